"""The examples of connectors in docs/agents.md, with random models, few rows and one rank."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ONE_RANK, metrics, train
from tests.readme import ROOT
from tests.selection import needs_package

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]

INSTALLED = ROOT / ".peers" / "connectors"
if INSTALLED.is_dir():
    # Last, so that shared packages are those of .venv.
    sys.path.append(str(INSTALLED))
SMALL = (
    *ONE_RANK,
    "trainer.steps=1",
    "trainer.prompts_per_step=2",
    "trainer.prompts_per_update=2",
    "rollout.samples_per_prompt=2",
    "trainer.validate_before=false",
    "data.val_max_prompts=8",
)


def example(directory: Path, library: str, task: str, *overrides: str) -> dict[str, float]:
    """Write the rows of the page's example for a demo's model and train a step on them; return its metrics."""
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    subprocess.run(
        [sys.executable, "scripts/demo_task.py", "--task", task, "--out", directory / task], cwd=ROOT, check=True
    )
    (training,) = re.findall(rf"^mcore-rl train (.*configs/connectors/{library}.yaml)$", text, re.MULTILINE)
    *below, config = training.split()
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    values = [f"model.hf_path={directory / task / 'model'}"]
    for line in re.findall(r"^mcore-rl (rows .*)$", text, re.MULTILINE):
        words = [word.replace("runs/rows", str(directory)) for word in shlex.split(line)]
        subprocess.run([sys.executable, "-m", "mcore_rl.cli", *words], cwd=ROOT, env={**os.environ, **path}, check=True)
    moved = directory / "moved.yaml"
    moved.write_text((ROOT / config).read_text().replace("runs/rows", str(directory)))
    first, *others = [*(ROOT / each for each in below), moved]
    train(first, directory / "run", *map(str, others), *values, *SMALL, *overrides, **path)
    return metrics(directory / "run")[1]


@needs_package("verifiers", "scripts/setup_connectors.sh")
@needs_package("inspect_ai", "scripts/setup_connectors.sh")
@needs_package("gymnasium", "scripts/setup_connectors.sh")
def test_verifiers_trains_and_inspect_validates(tmp_path: Path) -> None:
    found = example(
        tmp_path,
        "verifiers",
        "tool",
        "rollout.max_prompt_tokens=24",
        "algorithm.dynamic_sampling.enable=false",
    )
    assert found["val/errors"] == found["episode/failed"] == 0
    assert found["val/score/sums"] == found["val/accuracy/sums"]
    assert "val/has_product/products" in found
    assert "reward/has_product" in found


@needs_package("verifiers", "scripts/setup_connectors.sh")
@needs_package("inspect_ai", "scripts/setup_connectors.sh")
@needs_package("gymnasium", "scripts/setup_connectors.sh")
def test_gymnasium_is_trained_turn_by_turn(tmp_path: Path) -> None:
    found = example(tmp_path, "gymnasium", "game", "rollout.max_turns=3")
    assert found["val/errors"] == found["episode/failed"] == 0
    assert found["episode/turns"] > 1
