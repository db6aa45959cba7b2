"""Tracebacks of user functions: only their own frames, and at most MAX_LINES lines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import dropwhile
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException

from mcore_rl.rewards.processes import deadline

_CALLERS = (str(Path(deadline.__file__).parents[1]), str(Path(asyncio.__file__).parent))
MAX_LINES = 40
MAX_LINE_CHARS = 300


def traceback_of(error: BaseException) -> str:
    """Format a traceback as Python does; for a time limit, it shows where the function was interrupted."""
    if isinstance(error, deadline.DeadlineExceeded) and error.__cause__ is not None:
        error = error.__cause__  # where a coroutine was waiting (event_loop)
        error.__context__ = None
    traceback = TracebackException.from_exception(error)
    frames = [frame for frame in traceback.stack if frame.filename != deadline.__file__]
    users = list(dropwhile(_is_caller, frames))
    traceback.stack = StackSummary.from_list(users or frames)
    return "\n".join(_shortened("".join(traceback.format()).splitlines()))


def _is_caller(frame: FrameSummary) -> bool:
    return frame.filename.startswith(_CALLERS)


def _shortened(lines: list[str]) -> Iterable[str]:
    half = MAX_LINES // 2
    if len(lines) > MAX_LINES:
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} more lines ...", *lines[-half:]]
    return (line[:MAX_LINE_CHARS] for line in lines)
