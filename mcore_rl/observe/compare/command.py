"""Command `mcore-rl compare`: tables of runs, differing keys and metrics."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_rl.observe.compare.metric_comparison import MetricComparison, Statistic, compare_metrics, last_common_step
from mcore_rl.observe.compare.permutation import Significance
from mcore_rl.observe.compare.sides import SEED, Side, read_sides
from mcore_rl.observe.report.alerts import differences
from mcore_rl.observe.terminal_text import shortened, visible

VALUE_CHARS = 300
"""Characters of a configuration value that are shown."""


def compare(directories: Sequence[Path]) -> int:
    """Print the differences between runs on stdout.

    Returns: 0.
    Raises: ConfigError if a directory is no run or is named twice.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sides = read_sides(directories)
    console = Console(highlight=False)
    console.print(_runs(sides), "", _configurations(sides), "", sep="\n")
    step = last_common_step(sides)
    if step is None:
        console.print("metrics: no step has been finished by all runs")
        return 0
    console.print(_metrics(sides, compare_metrics(sides, step), step))
    if any(_is_tested(sides, number) for number in range(1, len(sides))):
        console.print(
            "p: exact two-sided permutation test over seeds; in brackets the smallest value that this number of runs "
            "can have. Among several metrics, some p are small by chance."
        )
    for run in (run for side in sides for run in side.runs):
        for note in dict.fromkeys(run.notes):
            console.print(visible(f"{run.directory}: {note}", "yellow"))
    return 0


def _letter(number: int) -> str:
    """Name sides A, B, ... Z, A1, B1, ..."""
    cycle, place = divmod(number, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(cycle) if cycle else "")


def _table(title: str, *heads: str) -> Table:
    return Table(
        *heads, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )


def _runs(sides: Sequence[Side]) -> Table:
    table = _table("runs", "", "run", "seed", "last step")
    table.columns[1].overflow = "fold"
    for number, side in enumerate(sides):
        for run in side.runs:
            seed, last = run.config.get(SEED), max(run.records, default=None)
            name = _letter(number) if run is side.runs[0] else ""
            table.add_row(name, visible(str(run.directory)), _value(seed), "-" if last is None else str(last))
    return table


def _configurations(sides: Sequence[Side]) -> Table | Text:
    """Return the keys that differ. Seeds are in the table of runs."""
    found = differences([side.config for side in sides])
    if not found:
        return Text("configuration: no key differs, except seeds and keys that describe where a run is started")
    letters = [_letter(number) for number in range(len(sides))]
    table = _table("configuration", "key", *letters)
    for column in table.columns:
        column.overflow = "fold"
    for key, values in found:
        table.add_row(visible(key), *map(_value, values))
    return table


def _value(value: object) -> Text:
    return Text("-", style="dim") if value is None else visible(shortened(str(value), VALUE_CHARS))


def _metrics(sides: Sequence[Side], rows: Sequence[MetricComparison], step: int) -> Table:
    """Return a table with the value on each side, and its difference from side A."""
    table = _table(f"metrics at step {step}", "", "A")
    for number in range(1, len(sides)):
        letter = _letter(number)
        for head in (letter, f"{letter} - A", *(["p"] if _is_tested(sides, number) else [])):
            table.add_column(head)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        cells = [row.name, _statistic(row.sides[0])]
        for number in range(1, len(sides)):
            difference = row.difference(number)
            cells += [_statistic(row.sides[number]), "-" if difference is None else f"{difference:+.3g}"]
            if _is_tested(sides, number):
                cells.append(_significance(row.significance(number)))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _is_tested(sides: Sequence[Side], number: int) -> bool:
    return min(len(sides[0].runs), len(sides[number].runs)) > 1


def _statistic(statistic: Statistic | None) -> str:
    """Format as `0.412`, or as `0.412 ± 0.013` for the mean and standard deviation of several runs."""
    if statistic is None:
        return "-"
    spread = statistic.deviation
    return f"{statistic.mean:.4g}" + ("" if spread is None else f" ± {spread:.3g}")


def _significance(found: Significance | None) -> str:
    return "-" if found is None else f"{found.p_value:.3g} ({found.smallest:.2g})"
