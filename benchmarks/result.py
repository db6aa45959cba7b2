"""What a benchmark says: figures beside what they are compared with, and where the time went."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


NO_GPU = "needs a CUDA device"


class SkippedError(Exception):
    """A benchmark cannot run here; the message says why and what to do about it."""


@dataclass(frozen=True)
class Result:
    """One row of the table.

    `limit` is the peer's figure, or the bound. `aim` is a bound on `ratio`, such as "<= 1.3"; empty: the row only
    informs. `note` holds lines that are printed below the table: what was compared, where the time goes.

    Units: ours and limit in `unit`.
    Raises: ValueError for an aim of another form.
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
        """Whether the aim is met; None without one."""
        if not self.aim:
            return None
        holds, bound = self._bound()
        return holds(self.ratio, bound)

    def _bound(self) -> tuple[Callable[[float, float], bool], float]:
        sign, _, bound = self.aim.partition(" ")
        if sign not in _COMPARISONS:
            raise ValueError(f"{self.name}: aim {self.aim!r} must be '<= number' or '>= number'")
        return _COMPARISONS[sign], float(bound)


@dataclass(frozen=True)
class Machine:
    """What figures belong to. `device` is the GPU's name, or cpu; `driver` NVIDIA's, empty without one; `versions` of
    packages by name, what is absent left out."""

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
        """The same in one line."""
        device = "" if self.device == "cpu" else f"{self.device}, driver {self.driver or 'unknown'}; "
        versions = " ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.date}  {device}{self.processor}, {self.cores} cores, load {self.load:.1f}, "
            f"{self.threads} thread(s) per process; {versions}"
        )

    @property
    def slug(self) -> str:
        """The device's name as a part of a file's."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")


@dataclass(frozen=True)
class Outcome:
    """How one benchmark ended: its rows, or the `reason` for which it has none (`skipped` or failed)."""

    benchmark: str
    results: tuple[Result, ...] = ()
    reason: str = ""
    skipped: bool = False
    seconds: float = 0.0


def shares(parts: Sequence[tuple[str, float]], total: float | None = None, unit: str = "ms") -> str:
    """'a 12 ms (40 %), b 18 ms (60 %)' of parts in seconds; what they leave of `total` is called the rest."""
    whole = sum(seconds for _, seconds in parts) if total is None else total
    named = list(parts)
    if total is not None:
        named.append(("rest", total - sum(seconds for _, seconds in parts)))
    scale = {"ms": 1e3, "s": 1.0}[unit]
    digits = {"ms": 1, "s": 2}[unit]
    return ", ".join(f"{name} {seconds * scale:.{digits}f} {unit} ({seconds / whole:.0%})" for name, seconds in named)
