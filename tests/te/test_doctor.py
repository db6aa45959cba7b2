"""The calls by which doctor tries TransformerEngine's kernels on a GPU are right: its own Python takes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.readme import ROOT
from tests.te.simulation import is_there

pytestmark = pytest.mark.skipif(
    not is_there(), reason="TransformerEngine's Python is not here: scripts/setup_te.sh fetches it"
)

NAMES = ["layer with its norm", "grouped GEMM", "permutation of tokens", "fused Adam"]
"""All but attention, whose kernels have no stand-in."""
PROGRAM = (
    "import sys; from tests.te.simulation import install; install(); "
    "from mcore_rl.doctor.kernels import KERNELS, call_each; call_each(KERNELS, 'cpu', sys.argv[1:])"
)


def test_every_call_is_taken() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *NAMES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert answers == [{"kernel": name, "error": ""} for name in NAMES]
