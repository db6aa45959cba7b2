"""Estimators, losses and loss weights by the data_source of a response: algorithm.per_source, algorithm.baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mcore_rl.algorithms import Estimator, advantage_options, estimator
from mcore_rl.config.algorithm import AlgorithmConfig, SourceConfig
from mcore_rl.config.models import OTHERS, TeacherConfig
from mcore_rl.errors import ConfigError

MAX_LISTED = 20
"""Maximum number of data sources listed in an error."""


@dataclass(frozen=True)
class Sources:
    """Data sources of the training prompts. Shapes: of_rows int64 [N], index in `names` of each prompt row."""

    names: tuple[str, ...]
    of_rows: np.ndarray

    @classmethod
    def of(cls, column: Sequence[str]) -> Sources:
        """Number the sources of a `data_source` column."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(column))}
        return cls(tuple(numbers), np.array([numbers[name] for name in column], np.int64))


@dataclass(frozen=True)
class SourceRules:
    """Settings of `algorithm` by data source. sources: None if no setting depends on them."""

    algorithm: AlgorithmConfig
    sources: Sources | None = None

    @cached_property
    def _entries(self) -> Mapping[str, SourceConfig]:
        return {entry.source: entry for entry in self.algorithm.per_source}

    def numbers(self, prompt_rows: np.ndarray) -> np.ndarray:
        """Return the number of the source of each response; 0 for all without sources. Shapes: int64 [B] -> [B]."""
        return np.zeros(len(prompt_rows), np.int64) if self.sources is None else self.sources.of_rows[prompt_rows]

    def loss_weights(self, prompt_rows: np.ndarray) -> np.ndarray | None:
        """Return the factor of the loss of each response, float32 [B]; None if all are 1."""
        if self.sources is None:
            return None
        weights = [self._entries[name].weight if name in self._entries else 1.0 for name in self.sources.names]
        return np.array(weights, np.float32)[self.numbers(prompt_rows)]

    def losses(self, prompt_rows: np.ndarray) -> np.ndarray | None:
        """Return the number of the loss of each response in AlgorithmConfig.loss_settings, int32 [B]; None if all have
        the same."""
        if self.sources is None or not (own := self.algorithm.loss_sources):
            return None
        numbers = {name: number for number, name in enumerate(own, start=1)}
        return np.array([numbers.get(name, 0) for name in self.sources.names], np.int32)[self.numbers(prompt_rows)]

    def estimators(self) -> list[tuple[AlgorithmConfig, np.ndarray | None]]:
        """Return the settings of each estimator with the numbers of its sources; None: of all sources.

        Sources with their own estimator are estimated separately; all others share algorithm.advantage.
        """
        if self.sources is None:
            return [(self.algorithm, None)]
        own = {name: entry for name, entry in self._entries.items() if entry.has_estimator}
        numbers = {name: number for number, name in enumerate(self.sources.names)}
        rest = np.array([number for name, number in numbers.items() if name not in own], np.int64)
        of_sources = [(of_source(self.algorithm, own[name]), np.array([numbers[name]])) for name in own]
        return [*of_sources, (self.algorithm, rest)]


def teacher_numbers(teacher: TeacherConfig, sources: Sources, prompt_rows: np.ndarray) -> np.ndarray:
    """Return the number of the teacher of each response in TeacherConfig.entries, -1 without one.

    Shapes: int64 [B] -> int32 [B].
    """
    numbers = {entry.source: number for number, entry in enumerate(teacher.entries)}
    others = numbers.get(OTHERS, -1)
    of_sources = np.array([numbers.get(name, others) for name in sources.names], np.int32)
    return of_sources[sources.of_rows[prompt_rows]]


def check_teacher_sources(teacher: TeacherConfig, sources: Sources | None) -> None:
    """Check that teacher.by_source names sources of the training data.

    Raises: ConfigError naming the source.
    """
    for entry in teacher.by_source:
        _check_known(f"teacher.by_source, {entry.source}", entry.source, sources)


def _check_known(key: str, source: str, sources: Sources | None) -> None:
    if sources is not None and source not in sources.names:
        known = ", ".join(sources.names[:MAX_LISTED]) + (", ..." if len(sources.names) > MAX_LISTED else "")
        raise ConfigError(f"{key}: data.train has no row with this data_source; it has: {known}")


def of_source(algorithm: AlgorithmConfig, entry: SourceConfig) -> AlgorithmConfig:
    """Return the settings of the advantages of a source. An entry that names an estimator has only its own options; one
    without uses the estimator of all sources and its other options."""
    given = {name: getattr(entry, name) for name in ("normalize_by_std", "std_level", "leave_one_out")}
    changed = given if entry.advantage is not None else {name: v for name, v in given.items() if v is not None}
    if entry.advantage is None:
        return replace(algorithm, **changed)
    options: dict[str, object] = {
        "gamma": None,
        "lam": None,
        "whiten": None,
        "part_weights": {},
        "advantage_kwargs": {},
    }
    return replace(algorithm, advantage=entry.advantage, **(options | changed))  # type: ignore[arg-type]  # by name


def check_sources(algorithm: AlgorithmConfig, sources: Sources | None = None) -> None:
    """Check the estimators of all sources, and that algorithm.per_source names sources of the training data and
    trains one of them (None: not read yet).

    Raises: ConfigError naming the source, or the estimator that cannot be used.
    """
    default = _built(algorithm)
    if algorithm.baseline != "prompt" and not (default.per_response and default.needs.group_ids):
        raise ConfigError(
            f"algorithm.baseline={algorithm.baseline}: algorithm.advantage={algorithm.advantage} does not compare the "
            "responses of a group with one number each; set it to prompt, or choose grpo"
        )
    weights = {entry.source: entry.weight for entry in algorithm.per_source}
    if sources is not None and not any(weights.get(name, 1.0) for name in sources.names):
        raise ConfigError(
            "algorithm.per_source: weight is 0 for every data_source of data.train, so that nothing is trained; set at "
            "least one of them"
        )
    for entry in algorithm.per_source:
        key = f"algorithm.per_source, {entry.source}"
        _check_known(key, entry.source, sources)
        if not entry.has_estimator:
            continue
        for settings in (algorithm, of_source(algorithm, entry)):
            chosen = _built(settings)
            if not chosen.per_response or chosen.needs.baseline_rewards or chosen.needs.parts:
                raise ConfigError(
                    f"{key}: estimators by source need rewards of responses only, but "
                    f"algorithm.advantage={settings.advantage} needs more; choose another one, or remove the options"
                )


def _built(algorithm: AlgorithmConfig) -> Estimator:
    return estimator(algorithm.advantage, **advantage_options(algorithm))
