"""Reward functions that users bring: `module_or_file.py:function` with verl's signature.

f(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> number | {"score": number, "acc": number, ...}

What else a dict holds are parts of the score: each by its name in the records of responses, and numbers in the metrics
too. The function may be async; its calls follow one another, as many at a time as there are reward.workers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from mcore_rl.config.functions import check_call, load_function
from mcore_rl.config.reward import NO_RULE, RewardConfig
from mcore_rl.rewards.processes.event_loop import EventLoop
from mcore_rl.types import Score

KEY = "reward.function"
GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")
FORM = f"f({', '.join(GIVEN)}, **reward.kwargs)"
BUILTIN = "math"
MAX_MESSAGE_CHARS = 300
MAX_PART_CHARS = 2000
METRICS = ("mean", "accuracy", "std", "errors", "greedy", "kl", "kl_coefficient", "model", "judge", "reward")
FIELDS = (
    *("prompt", "response", "tokens", "response_tokens", "finish_reason", "group", "sample", "version", "versions"),
    *("ground_truth", "error", "scores", "turns", "tool_calls", "messages", "mask", "turn_rewards"),
)
TAKEN = frozenset((*METRICS, *FIELDS))
"""Names of ours, in metrics under reward/ and val/ and in records: a part of such a name gets another."""


@dataclass(frozen=True)
class Sample:
    """What a grader sees of one response."""

    data_source: str
    response: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


Grader = Callable[[Sample], Score]


def check_reward_function(config: RewardConfig) -> None:
    """Loads what reward.function names, as the grading processes will.

    Raises: ConfigError naming reward.function and the cause.
    """
    load_grader(config)


def load_grader(config: RewardConfig) -> Grader:
    """The grader that `reward` configures.

    Raises: ConfigError naming reward.function and the cause.
    """
    if config.function == BUILTIN:
        from mcore_rl.rewards.math_grader import is_correct

        def grade_math(sample: Sample) -> Score:
            right = is_correct(sample.response, sample.ground_truth)
            return Score(config.correct if right else config.incorrect, float(right))

        return grade_math

    if config.function == NO_RULE:
        return lambda sample: Score(0.0, 0.0)

    function, kwargs = load_function(KEY, config.function, instead=BUILTIN, may_be_async=True), dict(config.kwargs)
    loop = EventLoop()
    check_call(f"{KEY}={config.function}", function, GIVEN, kwargs, FORM)

    def grade_with_function(sample: Sample) -> Score:
        result = function(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
            **kwargs,
        )
        return score_of(loop.run(result) if inspect.isawaitable(result) else result)

    return grade_with_function


def score_of(result: Any) -> Score:
    """A Score from what a user's function returned: a number, or a dict with `score`, perhaps `acc`, and parts.

    A result that is neither, or is not finite, becomes Score.error.
    """
    if not isinstance(result, Mapping):
        reward = _number(result)
        if reward is None:
            return failed(f"the reward function returned {_shown(result)} instead of a finite number or a dict")
        return Score(reward, reward)
    if "score" not in result:
        return failed(f"the reward function returned a dict without score: {_shown(result)}")
    reward = _number(result["score"])
    if reward is None:
        return failed(f"the reward function returned score {_shown(result['score'])} instead of a finite number")
    if result.get("acc") is None:
        return Score(reward, reward, parts=_parts(result))
    accuracy = _number(result["acc"])
    if accuracy is None:
        return failed(f"the reward function returned acc {_shown(result['acc'])} instead of a finite number")
    return Score(reward, accuracy, parts=_parts(result))


def failed(message: str, traceback: str | None = None) -> Score:
    """The score of a sample that could not be graded."""
    return Score(0.0, 0.0, message[:MAX_MESSAGE_CHARS], traceback)


def _parts(result: Mapping[Any, Any]) -> dict[str, float | str]:
    """What else a dict holds: numbers, where they are finite, and everything else as text; None is no part."""
    parts: dict[str, float | str] = {}
    for key, value in result.items():
        if key in ("score", "acc") or value is None:
            continue
        name, number = _as_text(key), _number(value)
        parts[f"{name}_part" if name in TAKEN else name] = _as_text(value) if number is None else number
    return parts


def _as_text(value: Any) -> str:
    """Any value, shortened, and without lone surrogates, which no file in UTF-8 can hold."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # whatever a user's class raises; of ours, an integer of more than 4,300 digits
        return f"<{type(value).__name__}>"
    return text[:MAX_PART_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()  # numpy scalars and 0-dimensional arrays
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}" if value is not None else "None"
