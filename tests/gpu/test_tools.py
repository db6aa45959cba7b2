"""Commands that users run next to training: processes that see a GPU but need none allocate no device memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import ROOT
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.cuda


def run(*arguments: str) -> tuple[int, str]:
    """Return exit code and standard output of `python -m ...`."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_conversion_there_and_back_is_exact(family: str, tmp_path: Path) -> None:
    hf, checkpoint = str(write_tiny_model(tmp_path / "hf", family)), str(tmp_path / "mcore")
    for command in (
        ("to-mcore", "--hf", hf, "--out", checkpoint, "--tp", "2", "--ep", "2"),
        ("verify", "--hf", hf, "--ckpt", checkpoint, "--logits"),
    ):
        code, text = run("model_converters", *command)
        assert code == 0, text


def test_a_plan_is_the_one_of_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("mcore_rl.cli", "plan", str(ROOT / "configs" / "qwen3_30b_a3b.yaml"), "--json")
    code, text = run(*command)
    assert code in (0, 3), text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(*command) == (code, text)
