"""Layout of engines and trainer ranks for a first configuration, found with the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore_rl.config.catalogue import find_keys
from mcore_rl.config.reading.overrides import parse_override
from mcore_rl.errors import ConfigError
from mcore_rl.planner.engine import GIB
from mcore_rl.planner.plan import Plan, make_plan
from mcore_rl.planner.suggest import suggest_layouts
from mcore_rl.starter.draft import Draft, Line, loaded

NUM_RESPONSES = 8
"""Responses that an engine on CPU decodes at a time."""


def with_layout(draft: Draft, num_gpus: int) -> Draft:
    """Add a layout for one node: the smallest engines for which a layout of the trainer ranks fits, and the fastest of
    these layouts.

    Raises: ConfigError if none fits.
    """
    problem = ""
    for tp in (size for size in range(1, num_gpus + 1) if num_gpus % size == 0):
        engines = {
            "rollout.tp": Line(tp, "GPUs of an engine: the fewest with which the run fits"),
            "rollout.num_engines": Line(num_gpus // tp, "one engine per rollout.tp GPUs"),
        }
        try:
            found = suggest_layouts(loaded({**draft, **engines}))
        # tp may not divide the model, for example its attention heads.
        except ConfigError as error:
            problem = problem or str(error)
            continue
        if found.suggestions:
            return {**draft, **engines, **_layout_lines(found.suggestions[0].overrides)}
        problem = found.problem
    gpus = f"{num_gpus} GPU{'' if num_gpus == 1 else 's'}"
    raise ConfigError(f"no layout of this model fits on {gpus}; use a smaller model, or more or larger GPUs: {problem}")


def with_kv_cache(draft: Draft) -> Draft:
    """Add a KV cache for CPU that holds NUM_RESPONSES of full length. Raises: ConfigError."""
    config = loaded(draft)
    tokens = NUM_RESPONSES * (config.rollout.max_prompt_tokens + config.rollout.max_response_tokens)
    gib = tokens * make_plan(config).times.engine.kv_bytes_per_token / GIB
    # In quarters of a GiB, rounded up.
    line = Line(math.ceil(4 * gib) / 4, f"KV cache of the engine: room for {NUM_RESPONSES} responses of full length")
    return {**draft, "rollout.kv_cache_gib": line}


def accepted(draft: Draft) -> Plan:
    """Return the plan of the configuration. Raises: ConfigError if `mcore-rl plan` would reject it."""
    plan = make_plan(loaded(draft))
    if not plan.fits:
        raise ConfigError(f"the configuration does not fit: {'; '.join(plan.verdict.errors)}")
    return plan


def _layout_lines(overrides: Sequence[str]) -> Draft:
    """Return the overrides of a suggestion that differ from the defaults, explained by the catalogue of keys."""
    entries = {entry.key: entry for entry in find_keys()}
    lines = {}
    for override in overrides:
        key, value = override.partition("=")[0], _value(override)
        if value != entries[key].default:
            lines[key] = Line(value, f"{entries[key].text.partition('. ')[0].rstrip('.')}; from `plan --suggest`")
    return lines


def _value(override: str) -> object:
    value: object = parse_override(override)
    for part in override.partition("=")[0].split("."):
        assert isinstance(value, dict)
        value = value[part]
    return value
