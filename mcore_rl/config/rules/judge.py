"""Rules for the keys of the judge."""

from __future__ import annotations

import os
import re
from pathlib import Path
from textwrap import shorten
from urllib.parse import urlsplit

from mcore_rl.config.fields import reject_unless_default
from mcore_rl.config.models import ModelConfig
from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.validation import check_engine_sizes, read_hf_config
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError

PLACEHOLDERS = re.compile(r"\{(prompt|response|ground_truth)\}")
NEEDED = ("prompt", "response")
SERVER_KEYS = ("url", "served_model", "api_key_variable", "timeout_seconds", "max_retries")
"""Keys without effect on a judge that runs on the run's own engines."""
ENGINE_KEYS = ("engine", "dtype", "num_engines", "tp", "kv_cache_gib", "gpu_memory_fraction", "enforce_eager")
"""Keys without effect on a judge behind a server."""


def uses_judge(judge: JudgeConfig) -> bool:
    return has_judge_engines(judge) or judge.url is not None


def has_judge_engines(judge: JudgeConfig) -> bool:
    """Return True if the judge runs on the run's own engines."""
    return judge.hf_path is not None


def validate_judge(judge: JudgeConfig, rollout: RolloutConfig, model: ModelConfig, *, cuda: bool) -> None:
    """Check the judge's section; reads the template and the judge's config.json. `cuda`: the engines run
    on GPUs.

    Raises: ConfigError for the first problem.
    """
    if not uses_judge(judge):
        reject_unless_default("judge", judge, "set judge.hf_path or judge.url")
        return
    if judge.url is not None:
        _check_server(judge, judge.url)
    else:
        reject_unless_default("judge", judge, "set judge.url instead of judge.hf_path", SERVER_KEYS)
    _check_numbers(judge)
    compiled_pattern(judge)
    text = template_text(judge)
    placeholders = set(PLACEHOLDERS.findall(text))
    for name in NEEDED:
        if name not in placeholders:
            raise ConfigError(f"judge.template has no {{{name}}}; put it where the {name} goes: {shorten(text, 80)}")
    if judge.parser is not None and judge.score_pattern != JudgeConfig().score_pattern:
        raise ConfigError(
            f"judge.score_pattern={judge.score_pattern} has no effect, since judge.parser={judge.parser} extracts the "
            "score; set one of the two"
        )
    if has_judge_engines(judge):
        role = EngineRole.judge(judge, rollout, model)
        check_engine_sizes(role, read_hf_config(role.model, role.checkpoint), cuda=cuda)


def template_text(judge: JudgeConfig) -> str:
    """Return the judge's prompt template; reads the file if judge.template names one.

    Raises: ConfigError if it is missing or cannot be read.
    """
    template = judge.template
    if template is None:
        raise ConfigError(
            "judge.template must be set with a judge: a prompt that asks for a score and contains {prompt} and "
            "{response}, or a .txt file with it"
        )
    # A text with placeholders is a template, even if it ends in ".txt".
    if not template.endswith(".txt") or PLACEHOLDERS.search(template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"judge.template={template} cannot be read: {error}") from None


def compiled_pattern(judge: JudgeConfig) -> re.Pattern[str]:
    """Compile judge.score_pattern. Raises: ConfigError if it is not a regular expression with one group."""
    try:
        pattern = re.compile(judge.score_pattern)
    except re.error as error:
        raise ConfigError(
            f"judge.score_pattern={judge.score_pattern} is not a regular expression: {error}; correct it"
        ) from None
    if pattern.groups != 1:
        raise ConfigError(
            f"judge.score_pattern={judge.score_pattern} has {pattern.groups} groups; put one, around the number "
            "(others can be (?:...))"
        )
    return pattern


def _check_server(judge: JudgeConfig, url: str) -> None:
    if judge.hf_path is not None:
        raise ConfigError(
            f"judge.hf_path={judge.hf_path} has no effect with judge.url={url}; set one of the two (the server's "
            "tokenizer is judge.tokenizer_path)"
        )
    address = urlsplit(url)
    # urlsplit accepts any text; without a scheme, the host is part of the path.
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"judge.url={url} is not the address of a server; write it as http://host:8000/v1")
    # The server has its own engines.
    reject_unless_default("judge", judge, "set judge.hf_path instead of judge.url", ENGINE_KEYS)
    if judge.tokenizer_path is None:  # without a tokenizer, prompt tokens are not counted
        reject_unless_default("judge", judge, "set judge.tokenizer_path", ("max_prompt_tokens",))


def server_key(judge: JudgeConfig) -> str | None:
    """Return the API key in judge.api_key_variable; None if the server needs no key.

    Raises: ConfigError if the variable is not set.
    """
    variable = judge.api_key_variable
    if variable is None:
        return None
    # An empty variable counts as unset.
    if key := os.environ.get(variable):
        return key
    raise ConfigError(f"judge.api_key_variable={variable}: there is no such environment variable; export it")


def _check_numbers(judge: JudgeConfig) -> None:
    if judge.weight == 0:
        raise ConfigError("judge.weight=0 leaves a judge without effect; set judge.hf_path and judge.url to null")
    low, high = judge.min_score, judge.max_score
    if low is not None and high is not None and low >= high:
        raise ConfigError(f"judge.min_score={low} must be below judge.max_score={high}")
    if judge.samples > 1 and judge.temperature == 0:
        raise ConfigError(
            f"judge.samples={judge.samples} greedy answers to a response would all be equal; set judge.temperature "
            "above 0, or one sample"
        )
