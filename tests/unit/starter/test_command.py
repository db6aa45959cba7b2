"""`mcore-rl init` with published models: `plan` accepts what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config import load_config
from mcore_rl.doctor import machine as hardware
from mcore_rl.doctor.machine import Machine
from mcore_rl.planner.plan import make_plan

MODELS = Path(__file__).parents[3] / "configs" / "models"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of the command without a model, on a machine without GPUs and without a terminal."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()
    monkeypatch.setattr(hardware, "this_machine", lambda: Machine(0, cores=2, host_memory_gib=16))
    return ["init", "--train", "train.jsonl", "--out", "new/my.yaml", "--model"]


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("gsm8k_tiny", None),
        ("Qwen2.5-32B", None),
        ("gsm8k_tiny", (1, 24)),
        ("gsm8k_tiny", (4, 24)),
        pytest.param("Qwen3-30B-A3B", (8, 80), marks=pytest.mark.on_demand),  # 8 s: many layouts of experts
    ],
)
def test_init_writes_what_plan_accepts(
    model: str, gpus: tuple[int, int] | None, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = [] if gpus is None else ["--gpus", str(gpus[0]), "--gpu-memory-gib", str(gpus[1])]
    assert main([*words, str(MODELS / model), "--algorithm", "dapo", *machine]) == 0
    printed = capsys.readouterr().out
    assert "plan: fits" in printed
    assert printed.splitlines()[-1] == "next: mcore-rl train new/my.yaml"
    config = load_config("new/my.yaml")
    plan = make_plan(config)
    assert (list(plan.verdict.errors), plan.cannot_run) == ([], [])
    assert config.cluster.gpus_per_node == config.num_trainer_ranks == (1 if gpus is None else gpus[0])
    assert config.rollout.num_engines * config.rollout.tp == config.cluster.gpus_per_node


def test_init_model_that_does_not_fit_writes_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, str(MODELS / "Qwen2.5-32B"), "--gpus", "1", "--gpu-memory-gib", "24"]) == 2
    assert "no layout of this model fits on 1 GPU" in capsys.readouterr().err
    assert not Path("new").exists()


def test_init_existing_file_is_kept(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("new").mkdir()
    Path("new/my.yaml").write_text("mine")
    assert main([*words, str(MODELS / "gsm8k_tiny")]) == 2
    assert "--out=new/my.yaml exists" in capsys.readouterr().err
    assert Path("new/my.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--gpus", "8"], "set both or none"), (["--gpus", "0", "--gpu-memory-gib", "80"], "--gpus=0 must be at least 1")],
)
def test_init_incomplete_machine_is_rejected(
    flags: list[str], message: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(MODELS / "gsm8k_tiny"), *flags]) == 2
    assert message in capsys.readouterr().err
