"""Writes docs/algorithms.md from the registry: every advantage and policy loss with formula, source, options, cost.

python scripts/algorithms_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from mcore_rl.algorithms import aggregation, kl, kl_controller
from mcore_rl.algorithms.advantages import user as user_advantage
from mcore_rl.algorithms.interface import Needs
from mcore_rl.algorithms.losses import user as user_loss
from mcore_rl.algorithms.registry import ADVANTAGES, POLICY_LOSSES

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"
COSTS = {
    "values": "a critic: its own weights and optimizer, a forward pass and an update per step",
    "baseline_rewards": "one more, greedy, response per prompt",
    "reference": "a frozen reference: its weights, a forward pass per step",
    "prox_logp": "a forward pass of the policy before the updates",
    "selection": "a forward pass of each update's tokens before it",
    "whole_sequence": "context-parallel ranks exchange the log-probabilities of their tokens",
}
HEADER = """\
# Advantages and policy losses

Written by `python scripts/algorithms_page.py` from the registry (`mcore_rl/algorithms/registry.py`); a test compares.
Options are those of `algorithm.*` (advantages) and `algorithm.policy_loss.*`; a name refuses options it does not take.
A name can also be `module_or_file.py:function`, a function of your own. It gets those of these options that are set,
and any others as `algorithm.advantage_kwargs.NAME=VALUE` or `algorithm.policy_loss.kwargs.NAME=VALUE`; how it is
called stands behind the losses.
"""


def page() -> str:
    """The whole page."""
    lines = [HEADER, "## Advantages: `algorithm.advantage`", ""]
    for name, entry in ADVANTAGES.items():
        lines += _section(name, entry)
    lines += ["## Policy losses: `algorithm.policy_loss.name`", ""]
    for name, loss in POLICY_LOSSES.items():
        lines += _section(name, loss)
    rest = {
        "An advantage of your own: `algorithm.advantage`": user_advantage,
        "A loss of your own: `algorithm.policy_loss.name`": user_loss,
        "Aggregation: `algorithm.loss_aggregation`": aggregation,
        "Estimates of KL: `algorithm.kl.loss_kind`, `algorithm.kl.reward_kind`": kl,
        "KL in the reward: `algorithm.kl.controller`": kl_controller,
    }
    for title, module in rest.items():
        lines += [f"## {title}", "", *_fenced(module.__doc__ or ""), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, entry: type[Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield from _fenced(sys.modules[entry.__module__].__doc__ or "")
    yield ""
    options = [f"`{field.name}` = {_default(field)}" for field in fields(entry)]
    yield f"Options: {', '.join(options) if options else 'none'}."
    costs = list(_costs(entry))
    yield f"Cost: {'; '.join(costs) if costs else 'nothing beside the update itself'}."
    yield ""


def _costs(entry: type[Any]) -> Iterator[str]:
    needs: Needs = entry.needs
    if getattr(entry, "per_response", None) is False:
        yield "computed on the ranks, token by token"
    yield from (cost for need, cost in COSTS.items() if getattr(needs, need, False))


def _default(field: Any) -> str:
    return "required" if field.default is MISSING else f"`{field.default}`"


def _fenced(text: str) -> list[str]:
    """A module's docstring: its first line as text, the rest as it stands."""
    first, _, rest = text.strip().partition("\n")
    return [first, "", "```text", *rest.strip("\n").splitlines(), "```"] if rest.strip() else [first]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
