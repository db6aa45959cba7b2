"""Progress of tokenisation: a line that changes on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from mcore_rl.data.tokenised.blocks import Block

QUIET_SECONDS = 2.0
"""Reading that takes less time shows nothing."""
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 30.0
"""Time between two updates."""


def with_progress(
    blocks: Iterable[Block], key: str, files: Sequence[Path], stream: TextIO | None = None
) -> Iterator[Block]:
    """Yield `blocks` and show how many rows have passed on `stream`, by default stderr: stdout is for results."""
    stream = stream or sys.stderr
    on_terminal, rows, started = stream.isatty(), 0, time.monotonic()
    next_update = started + QUIET_SECONDS
    with ExitStack() as stack:
        show = None
        for block in blocks:
            rows += len(block.prompts)
            now = time.monotonic()
            if now >= next_update:
                show = show or _display(stream, stack, on_terminal)
                position = f"file {block.file + 1} of {len(files)}, " if len(files) > 1 else ""
                speed = f"{rows / (now - started):,.0f} rows/s"
                show(f"{key}: {rows:,} rows tokenised ({position}{files[block.file]})  {speed}")
                next_update = now + (_TERMINAL_SECONDS if on_terminal else _LOG_SECONDS)
            yield block


def _display(stream: TextIO, stack: ExitStack, on_terminal: bool) -> Callable[[str], None]:
    if not on_terminal:
        return lambda line: print(line, file=stream, flush=True)
    from rich.console import Console
    from rich.text import Text

    status = stack.enter_context(Console(file=stream).status(""))
    return lambda line: status.update(Text(line))
