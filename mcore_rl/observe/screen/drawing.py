"""Frames of the live screen: the panels of `watch`, the work in progress and the printed lines."""

from __future__ import annotations

import locale
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from mcore_rl.config.schema import Config
from mcore_rl.observe.screen.board import Board
from mcore_rl.observe.screen.capture import CapturedOutput
from mcore_rl.observe.screen.panels import output_panel, work_panel
from mcore_rl.observe.screen.saving import SavedBytes
from mcore_rl.observe.signs import signs_for
from mcore_rl.observe.watch.bands import Band
from mcore_rl.observe.watch.frame import HEAD_ROWS, frame
from mcore_rl.observe.watch.heartbeat import Heartbeat
from mcore_rl.observe.watch.snapshot import Snapshot, SnapshotReader

SECONDS_PER_READ, PART_OF_TIME = 1.0, 20
"""Time between two looks at the run directory; at least PART_OF_TIME times as long as the last one computed."""
LOW_ROWS, FEW_LINES, MORE_LINES = 40, 4, 8
"""Printed lines that are shown beside curves, on a terminal with up to LOW_ROWS rows and on a higher one."""


class Drawing:
    """Draws on the terminal of `output` in its `with` block; used by one thread."""

    def __init__(self, config: Config, board: Board, output: CapturedOutput) -> None:
        self._board, self._output = board, output
        directory = Path(config.run.dir)
        self._saved = SavedBytes(directory / "checkpoints")
        holder = f"process {os.getpid()} on host {socket.gethostname()}"
        # This process holds the directory and is alive.
        alive = Heartbeat(lambda: (holder, time.time()))
        self._reader = SnapshotReader(directory, alive, signs_for(config))
        self._snapshot: Snapshot | None = None
        self._read_at = self._next_read = 0.0
        file = open(output.terminal, "w", encoding=locale.getencoding(), errors="replace", closefd=False)  # noqa: SIM115
        # rich would look for the size at descriptors that are redirected.
        self._console = Console(file=file, force_terminal=True, highlight=False, width=80, height=24)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def __enter__(self) -> Drawing:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def draw(self) -> None:
        """Draw one frame.

        Raises: ConfigError if the run directory was removed; OSError if the terminal is gone.
        """
        size = os.get_terminal_size(self._output.terminal)
        self._console.size = ConsoleDimensions(size.columns, size.lines)
        self._output.update()
        snapshot = self._current_snapshot()
        stages, counted = self._board.current()
        if (saving := self._saved.current()) is not None:
            counted.append(saving)
        work = Band([work_panel(stages, counted, lambda stage: snapshot.mean_of_last(f"time/{stage}"))], 3)
        work.min_rows = self._height(work)
        lines = _num_lines(snapshot, size.lines, work.min_rows)
        printed = Band([output_panel(self._output.lines.newest(lines))], 3)
        printed.min_rows = self._height(printed)
        self._live.update(frame(snapshot, self._console, size.lines, after_head=(work, printed)), refresh=True)

    def _height(self, band: Band) -> int:
        return len(self._console.render_lines(band.renderable(), pad=False))

    def _current_snapshot(self) -> Snapshot:
        now = time.monotonic()
        if self._snapshot is None or now >= self._next_read:
            before = time.thread_time()
            self._snapshot, self._read_at = self._reader.read(), now
            self._next_read = now + max(SECONDS_PER_READ, PART_OF_TIME * (time.thread_time() - before))
        snapshot = self._snapshot
        if snapshot.step_seconds is None:
            return snapshot
        return replace(snapshot, step_seconds=snapshot.step_seconds + now - self._read_at)


def _num_lines(snapshot: Snapshot, rows: int, work_rows: int) -> int:
    """Return the number of printed lines that are shown; before the first step they fill the screen."""
    if not snapshot.run.records:
        return max(rows - HEAD_ROWS - work_rows - 2, FEW_LINES)
    return FEW_LINES if rows <= LOW_ROWS else MORE_LINES
