"""Suites of tests/dist under TransformerEngine's layers, simulated: the same tests, whose models are then built as on a
GPU. With MCORE_RL_EVERY_TEST=1 in the environment all of them; by hand, `MCORE_RL_TE=1 python -m pytest tests/dist`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.readme import ROOT
from tests.te.ranks import FLAG
from tests.te.simulation import is_there

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_there(), reason="TransformerEngine's Python is not here: scripts/setup_te.sh fetches it"),
]

EVERY_TEST = bool(os.environ.get("MCORE_RL_EVERY_TEST"))
SUITES = {
    "test_invariance": "tp2 or cp2",
}
"""Module of tests/dist -> which of its tests (pytest's -k) run here, of many."""


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.timeout(1200)
def test_a_suite_of_the_ranks_passes(suite: str) -> None:
    chosen = [] if EVERY_TEST else ["-k", SUITES[suite]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/dist/{suite}.py", *chosen],
        cwd=ROOT,
        env={**os.environ, FLAG: "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-1000:]
    assert int(passed.group(1)) > 0
