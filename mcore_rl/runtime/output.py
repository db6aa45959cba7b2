"""Where the processes of a run write: a file of their own beside the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write_output_to(directory: Path, name: str) -> None:
    """From now on all that this process writes, libraries in C included, goes to the end of `name`.log."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / f"{name.replace(' ', '_')}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
