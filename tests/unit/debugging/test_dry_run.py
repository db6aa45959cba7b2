"""`train --dry-run` checks like `train`, and leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.config.schema import Config
from mcore_rl.trainer.checkpoints import Checkpoints
from mcore_rl.types import SavedState

HF = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}
SAVED: Any = SimpleNamespace(done=lambda: True, result=lambda: SavedState((), {}))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configuration whose preparation and plan are replaced."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF))
    (tmp_path / "t.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{hf_path: {tmp_path}/model}}\ndata: {{train: {tmp_path}/t.jsonl}}\n"
        "cluster: {device: cpu, gpus_per_node: 2, isolation: none}\n"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def prepared(config: Config) -> SimpleNamespace:
        # Only reinforcement learning has prompts.
        data = SimpleNamespace(prompts={"train": None} if config.trainer.objective == "rl" else {})
        return SimpleNamespace(
            critic=None,
            reward_model=None,
            checkpoint_bytes=0,
            lines=("1 prompt",),
            data=data,
            layout=SimpleNamespace(dp=1),
        )

    monkeypatch.setattr("mcore_rl.preparation.prepare.prepare", prepared)
    monkeypatch.setattr("mcore_rl.planner.plan.make_plan", lambda config: SimpleNamespace(fits=True))
    monkeypatch.setattr("mcore_rl.planner.report.print_plan", lambda plan, console: console.print("the plan"))
    return path


def files(directory: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in directory.rglob("*"))


def test_dry_run_prints_processes_and_writes_nothing(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(base.parent)
    assert main(["train", str(base), "--dry-run"]) == 0
    assert files(base.parent) == before
    out, err = capsys.readouterr()
    places = [out.index(word) for word in ("the plan", "driver", "trainer ranks 0-1", "rollout engine 0", "dry run:")]
    assert places == sorted(places)
    assert "1 prompt" in err


def test_dry_run_of_pairs_lists_no_engine(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["trainer.prompts_per_step=8", "trainer.prompts_per_update=8"]
    assert main(["train", str(base), "trainer.objective=reward_model", *sizes, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "trainer ranks 0-1" in out
    assert "rollout engine" not in out


def test_dry_run_plan_is_for_the_device_of_the_run(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Config] = []

    def make_plan(config: Config) -> SimpleNamespace:
        planned.append(config)
        return SimpleNamespace(fits=False)

    monkeypatch.setattr("mcore_rl.planner.plan.make_plan", make_plan)
    monkeypatch.setattr("mcore_rl.preparation.preflight.has_gpu", lambda: False)
    # A plan that does not fit has the exit code of `plan`.
    assert main(["train", str(base), "cluster.device=auto", "--dry-run"]) == 1
    assert planned[0].cluster.device == "cpu"


def test_dry_run_reads_data_without_the_cache(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):
        pass

    def prepare(config: Config) -> None:
        raise Seen(config.data.cache_dir)

    monkeypatch.setattr("mcore_rl.preparation.prepare.prepare", prepare)
    with pytest.raises(Seen) as caught:
        main(["train", str(base), f"data.cache_dir={base.parent / 'cache'}", "--dry-run"])
    assert caught.value.args == (None,)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("observe.trackers=[wandb,wandb]", "observe.trackers names wandb twice"),
        ("trainer.export_hf={base}/model", "exists already"),
        ("run.dir={base}/t.jsonl/run", "cannot be written: Not a directory"),
    ],
)
def test_dry_run_makes_the_checks_of_train(
    base: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(base), override.format(base=base.parent), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_finished_run_prints_its_state_only(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state: Any = {}
    Checkpoints(base.parent / "run" / "checkpoints", keep_last=1).save(4, state, lambda path: SAVED)
    assert main(["train", str(base), "trainer.steps=4", "--dry-run"]) == 0
    assert capsys.readouterr().out == "step 4 of 4 is done; raise trainer.steps to continue\n\n"


def test_dry_run_directory_in_use_is_named(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base.parent / "run").mkdir()
    holder = {"host": "n3", "pid": 17, "started": "today", "boot": "b", "job": "5", "token": "t"}
    (base.parent / "run" / "run.lock").write_text(json.dumps(holder))
    assert main(["train", str(base), "--dry-run"]) == 0
    assert "was taken by process 17 on host n3 (SLURM job 5)" in capsys.readouterr().err
