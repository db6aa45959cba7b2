"""Execution of a program that reads standard input, as in competition harnesses. Runs inside the sandbox."""

from __future__ import annotations

import os

from mcore_rl.rewards.graders.programs.prelude import execute


def main(program: str) -> None:
    _make_input_a_file()
    execute(program, "__main__")


def _make_input_a_file() -> None:
    """Replace standard input by a file, as in competitions: fast-input code reads os.fstat(0).st_size bytes."""
    try:
        file = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    except (AttributeError, OSError):  # O_TMPFILE needs Linux and a file system that supports it
        return
    while block := os.read(0, 1 << 16):
        while block:
            block = block[os.write(file, block) :]
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
