"""Results of benchmarks: measured values, their limits, and notes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


NO_GPU = "needs a CUDA device"


class SkippedError(Exception):
    """A benchmark cannot run on this machine; the message contains reason and remedy."""


@dataclass(frozen=True)
class Result:
    """One row of the table.

    `limit` is the peer's value, or a physical bound. `ratio` compares `ours` with `limit`, in the direction that `note`
    states (default: ours / limit). `aim` is the target of `ratio`, such as "<= 1.3"; empty: no target. `note` is
    printed below the table: details of the comparison, and the time of each part.

    Units: ours and limit in `unit`.
    Raises: ValueError for an aim in another format.
    """

    name: str
    ours: float
    limit: float
    unit: str
    ratio: float
    aim: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.aim:
            self._bound()

    @property
    def met(self) -> bool | None:
        """True if the aim is met; None if there is no aim."""
        if not self.aim:
            return None
        holds, bound = self._bound()
        return bool(holds(self.ratio, bound))  # a comparison of numpy numbers returns a numpy bool

    def _bound(self) -> tuple[Callable[[float, float], bool], float]:
        sign, _, bound = self.aim.partition(" ")
        if sign not in _COMPARISONS:
            raise ValueError(f"{self.name}: aim {self.aim!r} must be '<= number' or '>= number'")
        return _COMPARISONS[sign], float(bound)


def compare(name: str, ours: float, limit: float, unit: str, aim: str = "", note: str = "") -> Result:
    """Return the row with the ratio ours / limit."""
    return Result(name, ours, limit, unit, ours / limit, aim, note)


@dataclass(frozen=True)
class Machine:
    """Machine that produced the results.

    device: name of the GPU, or cpu.
    driver: version of NVIDIA's driver; empty without one.
    versions: installed packages by name.
    """

    date: str
    processor: str
    cores: int
    load: float
    threads: str
    device: str
    driver: str
    versions: dict[str, str]

    @property
    def line(self) -> str:
        """One-line description."""
        device = "" if self.device == "cpu" else f"{self.device}, driver {self.driver or 'unknown'}; "
        versions = " ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.date}  {device}{self.processor}, {self.cores} cores, load {self.load:.1f}, "
            f"{self.threads} thread(s) per process; {versions}"
        )

    @property
    def slug(self) -> str:
        """Name of the device for file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")


@dataclass(frozen=True)
class BenchmarkOutcome:
    """Outcome of a benchmark: its results, or the `reason` why it was skipped or failed."""

    benchmark: str
    results: tuple[Result, ...] = ()
    reason: str = ""
    skipped: bool = False
    seconds: float = 0.0


def shares(parts: Sequence[tuple[str, float]], total: float | None = None, unit: str = "ms") -> str:
    """Format parts in seconds as `a 12 ms (40 %), b 18 ms (60 %)`. With `total`, the remainder is called the rest."""
    whole = sum(seconds for _, seconds in parts) if total is None else total
    named = list(parts)
    if total is not None:
        named.append(("rest", total - sum(seconds for _, seconds in parts)))
    scale = {"ms": 1e3, "s": 1.0}[unit]
    digits = {"ms": 1, "s": 2}[unit]
    return ", ".join(f"{name} {seconds * scale:.{digits}f} {unit} ({seconds / whole:.0%})" for name, seconds in named)
