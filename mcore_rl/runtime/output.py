"""Log files of the processes of a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RAY_LOG = "ray.log"


def log_file(directory: Path, name: str) -> Path:
    """Return the log file of the process `name`."""
    return directory / f"{name.replace(' ', '_')}.log"


def stacks_file(directory: Path, name: str) -> Path:
    """Return the file of the process's stacks (processes.stacks) without its suffix, beside its log file."""
    return log_file(directory, name).with_suffix("")


def write_output_to(directory: Path, name: str) -> None:
    """Append all output of this process, including C libraries, to `name`.log from now on."""
    descriptor = _open(log_file(directory, name))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


@contextlib.contextmanager
def own_stderr() -> Iterator[None]:
    """Give sys.stderr a file descriptor of its own for the block, so that descriptor 2, to which C++ code writes, can
    be redirected. Enter it before anything keeps a reference to sys.stderr."""
    terminal, before = os.dup(2), (sys.stderr, sys.__stderr__)
    sys.stderr.flush()
    with os.fdopen(terminal, "w", buffering=1, encoding="utf-8", errors="backslashreplace") as stream:
        if sys.stderr is sys.__stderr__:  # a test may have replaced it
            sys.stderr = stream
        sys.__stderr__ = stream  # type: ignore[misc]
        try:
            yield
        finally:
            sys.stderr, sys.__stderr__ = before  # type: ignore[misc]


@contextlib.contextmanager
def ray_output_to(directory: Path) -> Iterator[None]:
    """Redirect Ray's output in this process to ray.log in `directory` for the block: stack dumps and log lines of C++
    code, which go to file descriptor 2, and errors of its daemons, which Ray prints. Does nothing outside of
    `own_stderr`, because Python's own output would be redirected too. Ray (2.60) has no option for it."""
    if sys.__stderr__ is None or sys.__stderr__.fileno() == 2:
        yield
        return
    from ray._private import worker as ray_worker  # not at the top: own_stderr is entered before Ray is imported

    file, before, print_before = _open(directory / RAY_LOG), os.dup(2), ray_worker.print_to_stdstream
    os.dup2(file, 2)
    ray_worker.print_to_stdstream = _write_lines
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = print_before
        os.dup2(before, 2)
        os.close(before)
        os.close(file)


def _write_lines(data: dict[str, Any], ignore_prefix: bool) -> None:
    """Replace Ray's print_to_stdstream: write the lines to file descriptor 2."""
    os.write(2, "".join(f"({data.get('pid')}) {line}\n" for line in data.get("lines", ())).encode())


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
