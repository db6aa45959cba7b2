"""Sides of a comparison: runs whose configurations differ only in run.seed are repetitions of one experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.config.run_configs import NOT_OF_THE_RUN
from mcore_rl.errors import ConfigError
from mcore_rl.observe.report.alerts import differences
from mcore_rl.observe.report.run_files import RunFiles, read_run

SEED = "run.seed"


@dataclass
class Side:
    """One or several runs with the same configuration and different seeds."""

    runs: list[RunFiles] = field(default_factory=list)

    @property
    def config(self) -> dict[str, object]:
        """Configuration of the first run without keys that may differ between the runs."""
        return {key: value for key, value in self.runs[0].config.items() if key != SEED and not _is_of_start(key)}

    @property
    def seeds(self) -> list[object]:
        return [run.config.get(SEED) for run in self.runs]


def read_sides(directories: Sequence[Path]) -> list[Side]:
    """Read the runs and group them.

    If all runs would be repetitions of one experiment, each one is a side.

    Raises: ConfigError if a directory is no run or is named twice.
    """
    places = [directory.resolve() for directory in directories]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise ConfigError(f"{directories[number]} is named twice; name different runs")
    runs = [read_run(directory) for directory in directories]
    sides = group_runs(runs)
    return sides if len(sides) > 1 else [Side([run]) for run in runs]


def group_runs(runs: Sequence[RunFiles]) -> list[Side]:
    """Group runs into sides, in the order of their first runs.

    A run with the seed of another one is a side of its own, because the two are not independent. The same holds for a
    run without a readable configuration.
    """
    sides: list[Side] = []
    for run in runs:
        alone = Side([run])
        same = (side for side in sides if run.config and not differences([side.config, alone.config]))
        side = next((side for side in same if run.config.get(SEED) not in side.seeds), None)
        if side is None:
            sides.append(alone)
        else:
            side.runs.append(run)
    return sides


def _is_of_start(key: str) -> bool:
    """Return True for keys that describe where a run is started, not what it computes."""
    return key.startswith(NOT_OF_THE_RUN)
