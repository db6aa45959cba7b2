"""Loading of the grader that `reward` configures: one function, one per data source, or a weighted sum of several."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from functools import cache, partial

from mcore_rl.config.functions import names_function
from mcore_rl.config.reward import BATCH, BY_DATA_SOURCE, GRADERS, NO_RULE, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.functions import BUILTIN, Grader, Rule, Sample, then, user_batch_grader, user_rule
from mcore_rl.rewards.graders.catalogue import PURE, RUN_CODE, grader_of
from mcore_rl.rewards.graders.code import RunProgram
from mcore_rl.rewards.math_grader import is_correct
from mcore_rl.rewards.results import TAKEN, NotApplicable, failed
from mcore_rl.sandbox.check import open_sandbox
from mcore_rl.sandbox.interface import Outcome, Program
from mcore_rl.types import Score

KEY = "reward.function"
UNNAMED = "unknown"
"""The data_source of rows without one (data.columns)."""


def runs_code(config: RewardConfig, data_sources: Collection[str]) -> bool:
    """Return whether the graders of these rows run code from responses."""
    named: set[str | None] = {entry.function for entry in config.entries}
    if BY_DATA_SOURCE in named:
        named |= {grader_of(source, config.functions) for source in set(data_sources)}
    return not named.isdisjoint(RUN_CODE)


def check_data_sources(config: RewardConfig, key: str, path: str, data_sources: Collection[str]) -> None:
    """Check that every row has a grader if rows select their graders. `key=path` is the rows' file.

    Raises: ConfigError naming data source, file and remedy.
    """
    if all(entry.function != BY_DATA_SOURCE for entry in config.entries):
        return
    for source, rows in Counter(data_sources).items():
        if grader_of(source, config.functions) is None:
            shown = f"{source!r} (the default for rows without one)" if source == UNNAMED else repr(source)
            raise ConfigError(
                f"{key}={path}: the data_source {shown} of {rows} rows has no grader with {KEY}={BY_DATA_SOURCE}; set "
                f"reward.functions to {{{source}: module_or_file.py:function}}, or to one of {', '.join(GRADERS)}"
            )


def needs_math(config: RewardConfig) -> bool:
    """Return whether graders may compare expressions, which requires slow imports (math-verify, sympy)."""
    named = {entry.function for entry in config.entries} | set(config.functions.values())
    return bool(named & {BY_DATA_SOURCE, *GRADERS})


def load_grader(config: RewardConfig, sandbox: SandboxConfig) -> Grader:
    """Load the grader that `reward` configures. The sandbox opens with the first program; most graders run none.

    Raises: ConfigError naming the key and the cause.
    """
    opened = cache(partial(open_sandbox, sandbox))

    def run(program: Program) -> Outcome:
        return opened().run(program)

    if config.manager == BATCH:
        return user_batch_grader(KEY, config.function, config.kwargs)
    rule = _weighted(config, run) if config.weighted else _rule(KEY, config.function, config.kwargs, config, run)

    def grade(samples: Sequence[Sample]) -> list[Score] | Awaitable[list[Score]]:
        return then(rule.grade(*samples), lambda score: [score])

    return Grader(grade, rule.is_async)


def _rule(key: str, name: str, kwargs: Mapping[str, str], config: RewardConfig, run: RunProgram) -> Rule:
    if name == NO_RULE:
        return Rule(lambda sample: Score(0.0, 0.0))
    if name == BY_DATA_SOURCE:
        return _by_data_source(kwargs, config, run)
    if name not in GRADERS:  # for unknown names, user_rule raises the error
        return user_rule(key, name, kwargs)
    if name == BUILTIN:
        return Rule(partial(_graded_math, config))
    grade = PURE[name] if name in PURE else partial(RUN_CODE[name], run=run, seconds=config.timeout_seconds)
    return Rule(lambda sample: grade(sample.response, sample.ground_truth))


def _graded_math(config: RewardConfig, sample: Sample) -> Score:
    right = is_correct(sample.response, sample.ground_truth)
    return Score(config.correct if right else config.incorrect, float(right))


def _by_data_source(kwargs: Mapping[str, str], config: RewardConfig, run: RunProgram) -> Rule:
    users = {
        spec: user_rule(f"reward.functions.{source}", spec, kwargs)
        for source, spec in config.functions.items()
        if names_function(spec)
    }

    @cache  # filled on demand, because patterns match any number of data sources
    def rule_of(source: str) -> Rule:
        name = grader_of(source, config.functions)
        if name is None:  # check_data_sources has rejected such rows before the run
            return Rule(lambda sample: failed(f"the data_source {source!r} has no grader"))
        return users[name] if name in users else _rule(f"reward.functions.{source}", name, {}, config, run)

    return Rule(lambda sample: rule_of(sample.data_source).grade(sample), any(rule.is_async for rule in users.values()))


def _weighted(config: RewardConfig, run: RunProgram) -> Rule:
    weights = dict(zip(_names(config), (entry.weight for entry in config.weighted), strict=True))
    rules = [
        _rule(f"reward.weighted[{i}].function", entry.function, entry.kwargs, config, run)
        for i, entry in enumerate(config.weighted)
    ]

    def joined(scores: Sequence[Score]) -> Score:
        own = {name: each for name, each in zip(weights, scores, strict=True) if not isinstance(each, NotApplicable)}
        for name, score in own.items():
            if score.error is not None:
                return failed(f"{name}: {score.error}", score.traceback)
        if not own:
            return failed("no function of reward.weighted applies to the response: each of them returned None")
        parts: dict[str, float | str] = {}
        for name, score in own.items():
            parts[name] = score.reward
            parts |= {f"{name}_{part}": value for part, value in score.parts.items()}
        reward = sum(weights[name] * score.reward for name, score in own.items())
        accurate = config.accuracy_of if config.accuracy_of in own else next(iter(own))
        return Score(reward, own[accurate].accuracy, parts=parts)

    def grade(sample: Sample) -> Score | Awaitable[Score]:
        return then(_together([rule.grade(sample) for rule in rules]), joined)

    return Rule(grade, any(rule.is_async for rule in rules))


def _together(scores: list[Score | Awaitable[Score]]) -> list[Score] | Awaitable[list[Score]]:
    if not any(inspect.isawaitable(score) for score in scores):
        return [score for score in scores if isinstance(score, Score)]

    async def gathered() -> list[Score]:
        tasks = [asyncio.ensure_future(_awaited(score)) for score in scores]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # after an error of another task; otherwise the task is done

    return gathered()


async def _awaited(score: Score | Awaitable[Score]) -> Score:
    return score if isinstance(score, Score) else await score


def _names(config: RewardConfig) -> list[str]:
    """Return the names of reward.weighted's functions.

    Raises: ConfigError for a reserved or repeated name, and for an unknown reward.accuracy_of.
    """
    names = [entry.name or entry.function.rpartition(":")[2] for entry in config.weighted]
    for index, name in enumerate(names):
        if name in TAKEN or name in names[:index]:
            whose = "is reserved for records and metrics" if name in TAKEN else "is already in use"
            raise ConfigError(
                f"reward.weighted[{index}].name={name} {whose}; set reward.weighted[{index}].name to another name"
            )
    if config.accuracy_of is not None and config.accuracy_of not in names:
        raise ConfigError(f"reward.accuracy_of={config.accuracy_of} must be one of {', '.join(names)}")
    return names
