"""Extraction of the score from a judge's answer: by the last match of a regular expression, or by a user's function."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from numbers import Real

import numpy as np

from mcore_rl.config.functions import check_call, describe, load_function
from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.rules.judge import compiled_pattern
from mcore_rl.rewards.judge.answers import Reply
from mcore_rl.types import Prompt

KEY = "judge.parser"
GIVEN = ("answer", "finish_reason", "data_source", "ground_truth", "extra_info")
FORM = f"f({', '.join(GIVEN)})"
CUT = "length"
MOST = float(np.finfo(np.float32).max)
"""Default bound of scores: rewards are float32, and a larger number from a judge must not end the run."""
MAX_MESSAGE_CHARS = 200


class NoScoreError(Exception):
    """An answer has no valid score."""


Reader = Callable[[Prompt, Reply], float]
"""Function that returns the score in a reply about a response to a prompt. Raises: NoScoreError."""


def score_reader(config: JudgeConfig) -> Reader:
    """Build the score reader that the section `judge` configures.

    Raises: ConfigError naming judge.parser or judge.score_pattern and the cause.
    """
    read: Reader
    if config.parser is None:
        read = partial(_read_by_pattern, compiled_pattern(config))
    else:
        function = load_function(KEY, config.parser, instead="null")
        check_call(f"{KEY}={config.parser}", function, GIVEN, {}, FORM)
        read = partial(_read_by_function, function)
    low = -MOST if config.min_score is None else config.min_score
    high = MOST if config.max_score is None else config.max_score

    def within_bounds(prompt: Prompt, reply: Reply) -> float:
        score = read(prompt, reply)
        if not low <= score <= high:
            raise NoScoreError(f"the score {score:g} is not between {low:g} and {high:g}")
        return score

    return within_bounds


def _read_by_pattern(pattern: re.Pattern[str], prompt: Prompt, reply: Reply) -> float:
    matches = list(pattern.finditer(reply.text))
    if not matches:
        raise NoScoreError("judge.score_pattern matches nothing")
    last = matches[-1]
    if reply.finish_reason == CUT and last.end() == len(reply.text):
        raise NoScoreError(f"the answer was cut at its score {last[0]!r}; raise judge.max_response_tokens")
    try:
        score = float(last[1])
    except (TypeError, ValueError):  # the group did not take part in the match, or is not a number
        score = math.nan
    if not math.isfinite(score):
        raise NoScoreError(f"{last[1]!r} is not a finite number")
    return score


def _read_by_function(function: Callable[..., object], prompt: Prompt, reply: Reply) -> float:
    given = (reply.text, reply.finish_reason, prompt.data_source, prompt.ground_truth, prompt.extra_info)
    try:
        score = function(**dict(zip(GIVEN, given, strict=True)))
    except Exception as error:  # the user's code may raise anything for unexpected text
        raise NoScoreError(f"{KEY} raised {describe(error)}"[:MAX_MESSAGE_CHARS]) from error
    if not isinstance(score, Real) or not math.isfinite(score):
        raise NoScoreError(f"{KEY} returned {score!r}, which is not a finite number"[:MAX_MESSAGE_CHARS])
    return float(score)
