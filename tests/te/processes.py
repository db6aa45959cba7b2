"""Python processes with simulated TransformerEngine. A process that has already imported Megatron cannot install it."""

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
    """Run Python with these arguments, and `variables` added to this environment. Returns its output.

    Raises: AssertionError with the end of both outputs if the process fails.
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
    """Return the JSON objects that the process prints, one per line; other lines are ignored."""
    return [json.loads(line) for line in run_python(*arguments, **variables).splitlines() if line.startswith("{")]
