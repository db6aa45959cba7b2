"""Text table of `make bench`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.result import BenchmarkOutcome, Result

COLUMNS = ("benchmark", "ours", "peer or limit", "ratio", "aim", "met")


def render(machine: str, outcomes: Sequence[BenchmarkOutcome]) -> str:
    """Return the machine, one row per result, notes, and the reasons of benchmarks without results."""
    rows = [_row(outcome.benchmark, result) for outcome in outcomes for result in outcome.results]
    widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    lines = [machine, "", _line(COLUMNS, widths), "  ".join("-" * width for width in widths)]
    lines += [_line(row, widths) for row in rows]
    for outcome in outcomes:
        lines += _notes(outcome)
    without = [outcome for outcome in outcomes if outcome.reason]
    if without:
        lines.append("")
    for outcome in without:
        lines.append(f"{outcome.benchmark}: {'skipped' if outcome.skipped else 'FAILED'}: {outcome.reason}")
    return "\n".join(lines)


def _notes(outcome: BenchmarkOutcome) -> list[str]:
    lines = []
    for result in outcome.results:
        if result.note:
            lines += ["", f"{outcome.benchmark}: {result.name}", *(f"    {line}" for line in result.note.splitlines())]
    return lines


def _row(benchmark: str, result: Result) -> tuple[str, ...]:
    met = {True: "yes", False: "NO", None: ""}[result.met]
    unit = f" {result.unit}" if result.unit else ""
    return (
        f"{benchmark}: {result.name}",
        f"{format_number(result.ours)}{unit}",
        f"{format_number(result.limit)}{unit}",
        format_number(result.ratio),
        result.aim,
        met,
    )


def format_number(value: float) -> str:
    """Format with four significant digits and no exponent."""
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = [
        cell.ljust(width) if i in {0, 4} else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join([first, *others]).rstrip()
