"""Command `mcore-rl watch`: repeated frames until the run has finished."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from mcore_rl.errors import ConfigError
from mcore_rl.observe.summary import summary_table
from mcore_rl.observe.terminal_text import visible
from mcore_rl.observe.watch.frame import frame, state_line
from mcore_rl.observe.watch.heartbeat import Heartbeat, Renewal
from mcore_rl.observe.watch.snapshot import Snapshot, SnapshotReader

SECONDS_PER_FRAME = 1.0


def watch(
    directory: Path,
    renewal: Callable[[], Renewal | None],
    *,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show the run on stdout until it has finished or the user presses Ctrl-C. `once`: print one frame.

    renewal: reads the record of the process that holds the directory.
    sleep: waits for the seconds until the next frame.

    Returns: 0.
    Raises: ConfigError if `directory` is no run, or if stdout cannot show a live screen and `once` is not set.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without UTF-8 cannot show curves, nor texts in other scripts.
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    try:
        reader = SnapshotReader(directory, Heartbeat(renewal))
        snapshot = reader.read()
        if once:
            console.print(frame(snapshot, console))
            return 0
        # rich takes a pipe for a terminal if FORCE_COLOR is set.
        if not sys.stdout.isatty() or console.is_dumb_terminal:
            raise ConfigError("watch needs a terminal that can move its cursor; add --once to print one frame")
        snapshot = _follow(reader, snapshot, console, sleep)
    except KeyboardInterrupt:
        return 0
    # The live screen is gone; these lines stay.
    console.print(visible(f"{directory}: {state_line(snapshot)}"), soft_wrap=True)
    for line in summary_table(snapshot.run.known_records()).split("\n"):
        console.print(visible(line), soft_wrap=True)
    return 0


def _follow(reader: SnapshotReader, snapshot: Snapshot, console: Console, sleep: Callable[[float], None]) -> Snapshot:
    """Show frames on the alternate screen until the run has finished. Returns the last snapshot."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not snapshot.has_finished:
            # The size may have changed since the last frame.
            live.update(frame(snapshot, console, console.height), refresh=True)
            sleep(SECONDS_PER_FRAME)
            snapshot = reader.read()
    return snapshot
