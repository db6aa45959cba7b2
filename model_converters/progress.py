"""Progress bar of conversions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def byte_progress(verb: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in bytes. Yields the function that advances it.

    Prints nothing if stderr is not a terminal.
    done_bytes: bytes that existed before the start; they do not count for the speed.
    """
    # Imported here, so that importing this module does not load rich.
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    size = (progress.TaskProgressColumn(), progress.DownloadColumn(binary_units=True))
    speed = (progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    columns = (progress.TextColumn(verb), progress.BarColumn(), *size, *speed)
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield partial(bar.advance, bar.add_task(verb, total=total_bytes, completed=done_bytes))
