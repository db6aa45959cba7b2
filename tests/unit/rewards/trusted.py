"""Responses with programs, and execution of trusted programs without a sandbox."""

from __future__ import annotations

import subprocess
import sys

from mcore_rl.sandbox.interface import Outcome, Program


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def run_trusted(program: Program) -> Outcome:
    command = [sys.executable, "-I", "-c", program.code]
    try:
        done = subprocess.run(
            command, input=program.stdin, capture_output=True, text=True, timeout=program.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome("timeout", 1, "", "", 0.0)
    return Outcome("exit", done.returncode, done.stdout, done.stderr, 0.0)
