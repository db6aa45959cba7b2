"""A program that reads standard input and prints, as the competition harnesses run it; runs inside the sandbox."""

from __future__ import annotations

import os

from mcore_rl.rewards.graders.programs.prelude import execute


def main(program: str) -> None:
    _make_input_a_file()
    execute(program, "__main__")


def _make_input_a_file() -> None:
    """Copy standard input into a file: judges give one, and fast input reads os.fstat(0).st_size bytes."""
    try:
        file = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    except (AttributeError, OSError):  # not on Linux, or not in this directory
        return
    while block := os.read(0, 1 << 16):
        while block:
            block = block[os.write(file, block) :]
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
