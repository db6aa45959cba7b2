"""TERM before a command has handlers of its own."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, signal, sys
from mcore_rl import cli
cli._keys = lambda options: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["mcore-rl", "keys"]
sys.exit(cli.main())
"""


def test_cli_on_term_before_a_run_exits_with_143() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 143
    assert not result.stderr
