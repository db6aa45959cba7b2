"""Warnings about signs of collapse or missing learning signal, with remedies for the run's configuration.

Thresholds are heuristics and never stop a run. Remedies never name an option that is already set or has no effect.
`guide` has the metrics, conditions and texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.config.models import RewardModelConfig
from mcore_rl.config.reward import NO_RULE, JudgeConfig, RewardConfig
from mcore_rl.config.rules.judge import uses_judge
from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.schema import Config
from mcore_rl.observe.guide.conditions import History
from mcore_rl.observe.guide.entries import MetricEntry, Remedy, Warned
from mcore_rl.observe.guide.table import ENTRIES, GRADIENT


@dataclass(frozen=True)
class Sign:
    """A warning about `metric`. `fields`: fields of its template that depend on the configuration."""

    metric: str
    warned: Warned
    fields: Mapping[str, str]

    def appears(self, step: int, now: float, history: History) -> bool:
        return step > self.warned.after_step and self.warned.condition.holds(now, history)

    def text(self, now: float, history: History, reward: float) -> str:
        """Format the warning. reward: mean reward of the step."""
        times = now / history.median if history.median else math.nan
        return self.warned.text.format(now=now, first=history.first, times=times, reward=reward, **self.fields)


@dataclass
class CollapseSigns:
    """Checks the metrics of every step for `signs`, and the gradient norm for outliers. Reports each sign once per
    run."""

    signs: Sequence[Sign]
    # Not saved: a resumed run compares with its first steps after the resume.
    _histories: dict[str, History] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)

    def check(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """Return warnings for signs that appear for the first time."""
        warnings = []
        for sign in [*self.signs, GRADIENT_SIGN]:
            now = values.get(sign.metric)
            if now is None:
                continue
            history = self._histories.setdefault(sign.metric, History(now))
            if sign.metric not in self._reported and sign.appears(step, now, history):
                self._reported.add(sign.metric)
                warnings.append(f"step {step}: {sign.text(now, history, values.get('reward/mean') or 0.0)}")
            history.recent.append(now)
        return warnings


def signs_for(config: Config) -> list[Sign]:
    """Return all signs except the gradient's, with remedies that apply to `config`."""
    graders = _graders(config.reward, config.judge, config.reward_model)
    return [
        Sign(entry.name, entry.alert, {"remedies": _either(_applicable(entry, config)), "graders": graders})
        for entry in ENTRIES.values()
        if isinstance(entry.alert, Warned) and entry.name != GRADIENT
    ]


def _gradient_sign(entry: MetricEntry) -> Sign:
    assert isinstance(entry.alert, Warned)
    return Sign(entry.name, entry.alert, {"remedies": _either(entry.remedies)})


def _applicable(entry: MetricEntry, config: Config) -> list[Remedy]:
    return [remedy for remedy in entry.remedies if remedy.applies(config)]


def _graders(reward: RewardConfig, judge: JudgeConfig, model: RewardModelConfig) -> str:
    """Return the names of all graders as text, joined by `and`."""
    named = [] if reward.function == NO_RULE and not reward.weighted else [reward.chosen]
    if uses_judge(judge):
        named.append("judge")
    if uses_reward_model(model):
        named.append("reward_model")
    return " and ".join(named) or reward.chosen


def _either(remedies: Sequence[Remedy]) -> str:
    *others, last = [remedy.text for remedy in remedies]
    return f"{', '.join(others)}, or {last}" if others else last


GRADIENT_SIGN = _gradient_sign(ENTRIES[GRADIENT])
"""Sign of every run; its remedies do not depend on the configuration."""
