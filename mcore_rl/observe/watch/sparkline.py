"""Curves of one line of text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"
MIN_COLUMNS, MAX_COLUMNS = 4, 60


@dataclass(frozen=True)
class Curve:
    """Sparkline that adapts to the width of its table column."""

    values: Sequence[float | None]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self.values, options.max_width), style="cyan", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(MIN_COLUMNS, MAX_COLUMNS).with_maximum(options.max_width)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw at most `width` characters, from the lowest value to the highest one. None is a blank.

    More values than characters are averaged over consecutive steps. A constant has the lowest level.
    """
    means = _means(values, width)
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    # Halves, because the difference of two finite numbers can exceed the range of floats.
    low, half = min(known), max(known) / 2 - min(known) / 2
    # The means of a constant differ by rounding.
    if half <= 1e-12 * max(abs(mean) for mean in known):
        half = 0.0
    return "".join(" " if mean is None else LEVELS[_level(mean / 2 - low / 2, half)] for mean in means)


def _level(height: float, highest: float) -> int:
    return round(height / highest * (len(LEVELS) - 1)) if highest > 0 else 0


def _means(values: Sequence[float | None], width: int) -> list[float | None]:
    """Divide the values into at most `width` buckets of consecutive ones."""
    count = min(width, len(values))
    edges = [round(place * len(values) / count) for place in range(count + 1)] if count else [0]
    return [_mean(values[first:end]) for first, end in itertools.pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(value / len(known) for value in known) if known else None
