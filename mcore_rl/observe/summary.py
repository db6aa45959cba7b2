"""The table at the end of a run: what training changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ROWS = (
    ("validation accuracy", "val/accuracy", "{:.3f}", "{:+.3f}"),
    ("reward (training)", "reward/mean", "{:.3f}", "{:+.3f}"),
    ("response tokens (training)", "response_tokens/mean", "{:.1f}", "{:+.1f}"),
    ("entropy (training)", "actor/entropy", "{:.3f}", "{:+.3f}"),
)


def summary_table(records: Sequence[dict[str, Any]]) -> str:
    """First and last value of the run's main metrics, with the steps that they are from.

    `records` are those of metrics.jsonl; a metric that was recorded once is shown as the last value only.
    """
    lines = [("", "before", "after", "change")]
    for title, key, form, change_form in _ROWS:
        seen = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        if not seen:
            continue
        (first_step, first), (last_step, last) = seen[0], seen[-1]
        before = f"{form.format(first)} (step {first_step})" if len(seen) > 1 else "-"
        change = change_form.format(last - first) if len(seen) > 1 else "-"
        lines.append((title, before, f"{form.format(last)} (step {last_step})", change))
    if len(lines) == 1:
        return "no step has been recorded"
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    rows = [_join(line, widths) for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def _join(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *others = cells
    aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    return "  ".join([first.ljust(widths[0]), *aligned])
