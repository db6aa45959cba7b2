"""User-supplied reward functions: `module_or_file.py:function` with verl's signatures.

f(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> number | {"score": number, "acc": number, ...}

With reward.manager=batch the function gets lists with one entry per response and returns one result per response:

f(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> [number | {"score": number, ...}, ...]

Other keys of a dict are parts of the score: they appear under their names in the rollout records, and numeric ones also
in the metrics. A function may be async.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from mcore_rl.config.functions import check_call, load_function
from mcore_rl.rewards.results import score_of, scores_of
from mcore_rl.types import Score

GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")
GIVEN_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
BUILTIN = "math"

T = TypeVar("T")
U = TypeVar("U")


class Sample(NamedTuple):
    """One response with the data that a grader receives, in the order of GIVEN."""

    data_source: str
    response: str
    ground_truth: object
    extra_info: Mapping[str, object]


@dataclass(frozen=True)
class Rule:
    """A grader of single responses. is_async: calls return awaitables and may run concurrently."""

    grade: Callable[[Sample], Score | Awaitable[Score]]
    is_async: bool = False


@dataclass(frozen=True)
class Grader:
    """A grader of batches that returns one score per response. is_async: calls return awaitables."""

    grade: Callable[[Sequence[Sample]], list[Score] | Awaitable[list[Score]]]
    is_async: bool = False


def user_rule(key: str, spec: str, kwargs: Mapping[str, str]) -> Rule:
    """Load the function that `key=spec` names.

    Raises: ConfigError naming `key` and the cause.
    """
    function = _loaded(key, spec, GIVEN, kwargs)

    def grade(sample: Sample) -> Score | Awaitable[Score]:
        return then(function(**dict(zip(GIVEN, sample, strict=True)), **kwargs), score_of)

    return Rule(grade, is_async(function))


def user_batch_grader(key: str, spec: str, kwargs: Mapping[str, str]) -> Grader:
    """Load the batch function that `key=spec` names.

    Raises: ConfigError naming `key` and the cause.
    """
    function = _loaded(key, spec, GIVEN_BATCH, kwargs)

    def grade(samples: Sequence[Sample]) -> list[Score] | Awaitable[list[Score]]:
        columns = map(list, zip(*samples, strict=True))
        result = function(**dict(zip(GIVEN_BATCH, columns, strict=True)), **kwargs)
        return then(result, lambda results: scores_of(results, len(samples)))

    return Grader(grade, is_async(function))


def then(result: T | Awaitable[T], finish: Callable[[T], U]) -> U | Awaitable[U]:
    """Return finish(result), or an awaitable of it if `result` is awaitable."""
    return _later(result, finish) if inspect.isawaitable(result) else finish(result)


def is_async(function: Callable[..., object]) -> bool:
    """Return whether calls of a function or callable object return coroutines."""
    call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    # A decorated function counts as the function that it wraps, and an object as its __call__.
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(call)


async def _later(result: Awaitable[T], finish: Callable[[T], U]) -> U:
    return finish(await result)


def _loaded(key: str, spec: str, given: Sequence[str], kwargs: Mapping[str, str]) -> Callable[..., object]:
    function = load_function(key, spec, instead=BUILTIN, may_be_async=True)
    kwargs_key = f"{key.rpartition('.')[0]}.kwargs" if key.endswith(".function") else "reward.kwargs"
    check_call(f"{key}={spec}", function, given, kwargs, f"f({', '.join(given)}, **{kwargs_key})")
    return function
