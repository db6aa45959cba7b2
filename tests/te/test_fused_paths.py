"""What megatron has TransformerEngine compute of experts is what it computes itself, forward and backward."""

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


def test_permutations_and_the_routers_product_are_those_of_megatron() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.te.fused_paths"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["case"], len(line["errors"])) for line in lines] == [
        ("there_and_back", 5),
        ("chunks", 4),
        ("router", 3),
    ]
    assert max(error for line in lines for error in line["errors"]) < 1e-5
