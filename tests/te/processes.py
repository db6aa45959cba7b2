"""Python processes with TransformerEngine simulated: a process in which megatron is imported already cannot have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.readme import ROOT
from tests.te.simulation import is_there

NEEDS_TE = pytest.mark.skipif(
    not is_there(), reason="TransformerEngine's Python is not here: scripts/setup_contracts.py fetches it"
)


def run_python(*arguments: str, **variables: str) -> str:
    """What Python prints that is started with these arguments, in this environment with these variables besides.

    Raises: AssertionError with the end of both outputs where it fails.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def json_lines(*arguments: str, **variables: str) -> list[dict[str, Any]]:
    """The objects that it prints, one per line, among what others print there."""
    return [json.loads(line) for line in run_python(*arguments, **variables).splitlines() if line.startswith("{")]
