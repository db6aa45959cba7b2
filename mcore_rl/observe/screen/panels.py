"""Panels of the live screen that `watch` does not have: work in progress, and printed lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mcore_rl.observe.progress import clock
from mcore_rl.observe.screen.board import Work
from mcore_rl.observe.terminal_text import visible

BAR_COLUMNS = 30
MAX_COUNTED = 6
"""Counted works that are shown."""


def work_panel(stages: Sequence[Work], counted: Sequence[Work], mean_seconds: Callable[[str], float | None]) -> Panel:
    """Show the current stages, and a bar for each counted work.

    mean_seconds: returns the mean time of a stage in the last steps; None if it is unknown.
    """
    now = time.monotonic()
    parts: list[RenderableType] = []
    if stages:
        stage = stages[0]
        mean = mean_seconds(stage.name)
        known = "no fraction is known" if mean is None else f"mean of the last steps {mean:.2f} s"
        names = " > ".join(work.name for work in stages)
        elapsed = f"for {clock(stage.seconds(now))}"
        parts.append(visible(f"{names}  {elapsed}" + ("" if counted and mean is None else f"  ({known})")))
    if counted:
        parts.append(_bars(counted[:MAX_COUNTED], now))
    return Panel(Group(*parts or [Text("waiting", style="dim")]), title="now", title_align="left")


def _bars(counted: Sequence[Work], now: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for work in counted:
        left = work.seconds_left(now)
        seconds = f"for {clock(work.seconds(now))}" if left is None else f"left {clock(left)}"
        table.add_row(visible(work.name), _bar(work), _amount(work), seconds)
    return table


def _bar(work: Work) -> RenderableType:
    if work.total is None:
        return ""
    return ProgressBar(total=max(work.total, 1), completed=min(work.done, work.total), width=BAR_COLUMNS)


def _amount(work: Work) -> str:
    form = (lambda value: decimal(int(value))) if work.unit == "bytes" else "{:.0f}".format
    unit = "" if work.unit == "bytes" else f" {work.unit}"
    # Without a total, there is nothing to compare with, such as an earlier checkpoint.
    return form(work.done) + ("" if work.total is None else f" of {form(work.total)}") + unit


def output_panel(lines: Sequence[str]) -> Panel:
    """Show printed lines, each on one row."""
    rows = [visible(line) for line in lines]
    for row in rows:
        row.no_wrap, row.overflow = True, "ellipsis"
    return Panel(Group(*rows), title="output", title_align="left")
