"""A program that reads standard input and prints, as the competition harnesses run it; runs inside the sandbox."""

from __future__ import annotations

from mcore_rl.rewards.graders.programs.prelude import execute


def main(program: str) -> None:
    execute(program, "__main__")
