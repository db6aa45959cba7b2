"""One frame of the live view: progress, curves, time per phase, warnings, last responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mcore_rl.observe.journal import STEP_PHASES
from mcore_rl.observe.progress import clock
from mcore_rl.observe.summary import MAIN_METRICS
from mcore_rl.observe.terminal_text import shortened, visible
from mcore_rl.observe.watch.bands import Band, fit_rows
from mcore_rl.observe.watch.snapshot import WINDOW, Snapshot
from mcore_rl.observe.watch.sparkline import Curve
from mcore_rl.types.json import JsonObject, JsonValue

WIDE = 150
"""Columns from which curves and phases are side by side; the curves then have about 20 columns."""
NARROW = 50
"""Columns below which metrics and phases are lines with one number: the cells of a table would be cut to nothing."""
HEAD_ROWS, METRIC_ROWS, PHASE_ROWS, ALERT_ROWS, RESPONSE_ROWS = 5, 7, 5, 3, 7
"""Rows of each part, with borders, on a low terminal."""
MAX_ALERTS = 6
"""Warnings about steps, and about the whole run, that are shown."""
FACTS = ("group", "sample", "reward", "accuracy", "tokens")
"""Numbers of a response that are shown."""
ALERT_CHARS, PROMPT_CHARS, RESPONSE_CHARS = 400, 200, 600
"""Characters of a text that are shown."""


def frame(
    snapshot: Snapshot, console: Console, rows: int | None = None, *, after_head: Sequence[Band] = ()
) -> RenderableType:
    """Return the parts that have contents, for the width of `console`.

    rows: height of the terminal, on which every part gets some rows as far as possible; None: everything is shown.
    after_head: further parts, shown below the progress.
    """
    is_narrow = console.width < NARROW
    middle = [(_metrics(snapshot, is_narrow), METRIC_ROWS), (_phases(snapshot, is_narrow), PHASE_ROWS)]
    bands = [Band([panel], min_rows) for panel, min_rows in middle if panel is not None]
    if console.width >= WIDE and len(bands) == 2:
        bands = [Band([*bands[0].panels, *bands[1].panels], METRIC_ROWS)]
    last = [(_alerts(snapshot), ALERT_ROWS), (_responses(snapshot), RESPONSE_ROWS)]
    bands += [Band([panel], min_rows) for panel, min_rows in last if panel is not None]
    bands = [Band([_progress(snapshot)], HEAD_ROWS), *after_head, *bands]
    if rows is not None:
        fit_rows(bands, console, rows)
    return Group(*(band.renderable() for band in bands))


def state_line(snapshot: Snapshot) -> str:
    """Describe in one sentence whether the run is in progress."""
    holder, total, last = snapshot.holder, snapshot.run.total_steps, snapshot.last_step
    if holder is not None and holder.is_alive:
        state = "all steps are done, saving" if snapshot.all_steps_done else "running"
        return f"{state}: {holder.description}"
    if snapshot.has_finished:
        return "finished"
    if holder is not None:
        return f"no sign of life for {clock(holder.silent_seconds)}: {holder.description}"
    return "not running" if total is None else f"not running, steps left: {total - (last or 0)}"


def _progress(snapshot: Snapshot) -> Panel:
    """Return the state, a bar of the steps, and times."""
    total, last = snapshot.run.total_steps, snapshot.last_step or 0
    steps = Table.grid(padding=(0, 2))
    if total is None:
        steps.add_row(f"step {last}")
    else:
        steps.add_row(f"step {last}/{total}", ProgressBar(total=max(total, 1), completed=min(last, total), width=40))
    style = "green" if snapshot.is_alive or snapshot.has_finished else "bold red"
    title = visible(shortened(str(snapshot.run.directory), PROMPT_CHARS))
    lines = (visible(state_line(snapshot), style), steps, Text(_times(snapshot)))
    return Panel(Group(*lines), title=title, title_align="left")


def _times(snapshot: Snapshot) -> str:
    """Return times and the number of warnings."""
    each, left = snapshot.mean_of_last("time/step"), snapshot.seconds_left()
    parts = [f"left {clock(left)}"] if left is not None and not snapshot.all_steps_done else []
    if each is not None:
        parts.append(f"{each:.2f} s per step")
    if snapshot.is_alive and snapshot.step_seconds is not None:
        parts.append(f"last step ended {clock(snapshot.step_seconds)} ago")
    # A low terminal shows only the first of them.
    if count := len(snapshot.alerts):
        parts.append(f"{count} warning{'s' * (count > 1)}")
    return "  ".join(parts)


def _metrics(snapshot: Snapshot, is_narrow: bool) -> Panel | None:
    """Return the curve, last value and range of each metric; only the last value if `is_narrow`."""
    records = snapshot.run.records
    table = Table("", "", "last", "lowest", "highest", box=None, pad_edge=False, header_style="dim")
    # Only the curves give way if the terminal is narrow.
    table.columns[0].no_wrap = True
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for name in MAIN_METRICS:
        values = [record[name] for record in records.values() if name in record]
        known = [value for value in values if value is not None]
        if known:
            table.add_row(name, Curve(values), *map(_number, (values[-1], min(known), max(known))))
    shown = _lines(table, 2) if is_narrow else table
    return Panel(shown, title=f"metrics of {len(records)} steps", title_align="left") if table.rows else None


def _lines(table: Table, place: int) -> Group:
    """Return the first cell of each row with the cell at `place`, as a line that is folded if needed."""
    names, numbers = (table.columns[column].cells for column in (0, place))
    return Group(*(Text(f"{name} {number}", overflow="fold") for name, number in zip(names, numbers, strict=True)))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    # Tokens per second are not shown with an exponent.
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _phases(snapshot: Snapshot, is_narrow: bool) -> Panel | None:
    """Return the seconds of each phase of a step, only their mean if `is_narrow`; phases without time are left out."""
    last: Mapping[str, float | None] = snapshot.run.records.get(snapshot.last_step or 0, {})
    means = {phase: mean for phase in STEP_PHASES if (mean := snapshot.mean_of_last(f"time/{phase}"))}
    if not means:
        return None
    table = Table("", "last", "mean", "", box=None, pad_edge=False, header_style="dim")
    for column in table.columns[1:3]:
        column.justify, column.no_wrap = "right", True
    longest = max(means.values())
    for phase, mean in means.items():
        seconds = last.get(f"time/{phase}")
        bar = Bar(longest, 0, mean, width=16, color="cyan")
        table.add_row(phase, "-" if seconds is None else f"{seconds:.2f}", f"{mean:.2f}", bar)
    shown = _lines(table, 2) if is_narrow else table
    return Panel(shown, title=f"seconds per phase, mean of up to {WINDOW} steps", title_align="left")


def _alerts(snapshot: Snapshot) -> Panel | None:
    """Return the warnings about steps, the newest first, then those about the whole run."""
    of_run = [alert for alert in snapshot.alerts if alert.step is None]
    of_steps = [alert for alert in snapshot.alerts if alert.step is not None]
    shown = [*of_steps[: -MAX_ALERTS - 1 : -1], *of_run[:MAX_ALERTS]]
    if not shown:
        return None
    lines = []
    for alert in shown:
        place = "" if alert.step is None else f"step {alert.step}: "
        lines.append(visible(place + shortened(alert.text, ALERT_CHARS), "yellow"))
    if others := len(snapshot.alerts) - len(shown):
        lines.append(Text(f"{others} more are in the report: mcore-rl report RUN_DIR", style="dim"))
    return Panel(Group(*lines), title="warnings", title_align="left", border_style="yellow")


def _responses(snapshot: Snapshot) -> Panel | None:
    file, records = snapshot.responses.file, snapshot.responses.records
    if file is None:
        return None
    kind = "validation responses" if file.is_validation else "responses"
    # The newest one first: a low terminal cuts off the others.
    lines = [line for record in reversed(records) for line in _response(record)]
    return Panel(Group(*lines), title=f"last {kind}, step {file.step}", title_align="left")


def _response(record: JsonObject) -> list[Text]:
    """Return the facts, the prompt and the response of a record, one paragraph each."""
    facts = [f"{name} {_short(record[name])}" for name in FACTS if isinstance(record.get(name), int | float)]
    facts += [text for name in ("finish_reason", "error") if (text := _text(record, name))]
    return [
        visible(shortened("  ".join(facts), ALERT_CHARS), "bold red" if _text(record, "error") else "bold"),
        visible(shortened(_text(record, "prompt"), PROMPT_CHARS), "dim"),
        visible(shortened(_text(record, "response"), RESPONSE_CHARS)),
    ]


def _text(record: JsonObject, name: str) -> str:
    """Return a text of the record; empty if it has none."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


def _short(value: JsonValue) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
