"""Reward functions that users bring: `module_or_file.py:function` with verl's signature.

f(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> number | {"score": number, "acc": number}
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.config.schema import RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.types import Score

BUILTIN = "math"
MAX_MESSAGE_CHARS = 300


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

    function, kwargs = load_function(config.function), dict(config.kwargs)
    _check_signature(config.function, function, kwargs)

    def grade_with_function(sample: Sample) -> Score:
        return score_of(
            function(
                data_source=sample.data_source,
                solution_str=sample.response,
                ground_truth=sample.ground_truth,
                extra_info=sample.extra_info,
                **kwargs,
            )
        )

    return grade_with_function


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `module_or_file.py:function` names. A file's path is relative to the working directory.

    Raises: ConfigError.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"reward.function={spec} must be {BUILTIN} or module_or_file.py:function")
    module = _load_file(spec, Path(source)) if source.endswith(".py") else _load_module(spec, source)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"reward.function={spec}: {source} has no function {name}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"reward.function={spec}: {name} must be a plain function, not {type(function).__name__}")
    return function


def score_of(result: Any) -> Score:
    """A Score from what a user's function returned: a number, or a dict with `score` and perhaps `acc`.

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
        return Score(reward, reward)
    accuracy = _number(result["acc"])
    if accuracy is None:
        return failed(f"the reward function returned acc {_shown(result['acc'])} instead of a finite number")
    return Score(reward, accuracy)


def failed(message: str) -> Score:
    """The score of a sample that could not be graded."""
    return Score(0.0, 0.0, message[:MAX_MESSAGE_CHARS])


def describe(error: BaseException) -> str:
    """An exception on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()  # numpy scalars and 0-dimensional arrays
    if not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}" if value is not None else "None"


def _load_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward.function={spec}: there is no file {path.absolute()}")
    name = f"mcore_rl_user_reward_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"reward.function={spec}: {path} does not import: {describe(error)}") from error
    return module


def _load_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        hint = "" if "/" not in name else " (a file's name must end in .py)"
        raise ConfigError(f"reward.function={spec}: {name} does not import: {describe(error)}{hint}") from error


def _check_signature(spec: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return
    try:
        signature.bind(data_source="", solution_str="", ground_truth="", extra_info={}, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reward.function={spec} cannot be called as f(data_source, solution_str, ground_truth, extra_info, "
            f"**reward.kwargs): {error}"
        ) from error
