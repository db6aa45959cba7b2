"""Main metrics, and their table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ROWS = (
    ("validation accuracy", "val/accuracy", "{:.3f}", "{:+.3f}"),
    ("reward (training)", "reward/mean", "{:.3f}", "{:+.3f}"),
    ("tokens (training)", "response_tokens/mean", "{:.1f}", "{:+.1f}"),
    ("validation loss", "val/loss", "{:.4f}", "{:+.4f}"),
    ("validation margin", "val/margin", "{:.3f}", "{:+.3f}"),
    ("entropy (training)", "actor/entropy", "{:.3f}", "{:+.3f}"),
    ("turns (training)", "episode/turns", "{:.2f}", "{:+.2f}"),
    ("tool calls (training)", "episode/tool_calls", "{:.2f}", "{:+.2f}"),
)
"""Title, metric, format of values, format of the change."""
ACCURACY = "val/accuracy"
MAIN_METRICS = (
    *("reward/mean", ACCURACY, "response_tokens/mean", "response_tokens/clipped_fraction"),
    *("groups/without_signal", "actor/loss", "actor/entropy", "actor/ppo_kl", "actor/clip_fraction"),
    *("actor/grad_norm", "rollout/logp_diff_mean", "staleness/mean", "throughput/tokens_per_second"),
)
"""Metrics that the live view and comparisons of runs show, if a run has them."""
_HEAD = ("", "before", "best", "after", "change")


def summary_table(records: Sequence[Mapping[str, float]]) -> str:
    """Return the first and last value of the main metrics, and the best validation accuracy, each with its step.

    Ties go to the earlier step. A single value of a metric is in the column `after`.

    records: content of metrics.jsonl.
    """
    lines: list[tuple[str, ...]] = [_HEAD]
    for title, key, form, change_form in (*_ROWS[:1], *_parts(records), *_ROWS[1:]):
        seen = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        if not seen:
            continue
        best = max(seen, key=lambda one: one[1])
        cells = [f"{form.format(value)} (step {step})" for step, value in (seen[0], best, seen[-1])]
        change = change_form.format(seen[-1][1] - seen[0][1])
        if len(seen) == 1:
            cells[:2], change = ["-", "-"], "-"
        # For other metrics, the highest value is not always the best one.
        elif not key.startswith(ACCURACY):
            cells[1] = ""
        lines.append((title, *cells, change))
    if len(lines) == 1:
        return "no step has been recorded"
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    rows = [_join(line, widths) for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def _parts(records: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str, str]]:
    """Return rows for the accuracy of each set and source, if there are several."""
    keys = dict.fromkeys(key for record in records for key in record if key.startswith(f"{ACCURACY}/"))
    # A single part equals the overall accuracy.
    if len(keys) < 2:
        return []
    return [(f"  {key.removeprefix(f'{ACCURACY}/')}", key, *_ROWS[0][2:]) for key in keys]


def _join(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *others = cells
    aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    return "  ".join([first.ljust(widths[0]), *aligned])
