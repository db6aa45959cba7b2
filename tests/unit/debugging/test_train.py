"""`debug train` names the steps that can be repeated, and shows repeated metrics beside recorded ones."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from mcore_rl import cli
from mcore_rl.config import load_config
from mcore_rl.debugging.repeated_metrics import compare, recorded_metrics, show_metrics, write_metrics
from mcore_rl.debugging.train import start_of
from mcore_rl.errors import ConfigError, DamagedCheckpointError
from mcore_rl.preparation.prepare import prepare_models
from mcore_rl.preparation.run_dir import run_lock
from mcore_rl.trainer.checkpoints import Checkpoints
from mcore_rl.types import SavedState

HF = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}


class Save:
    """Save without files of ranks."""

    def done(self) -> bool:
        return True

    def result(self) -> SavedState:
        return SavedState((), {})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Run with checkpoints of steps 2 and 4, and trajectories of steps 1, 3 and 4."""
    directory = tmp_path / "run"
    for step in (1, 3, 4):
        (directory / "trajectories" / f"step_{step}").mkdir(parents=True)
    for step in (2, 4):
        Checkpoints(directory / "checkpoints", 2).save(step, {}, lambda path: Save())  # type: ignore[typeddict-item]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF))
    (directory / "config.yaml").write_text(
        f"run: {{dir: elsewhere}}\nmodel: {{hf_path: {tmp_path}/model}}\ndata: {{train: gone.jsonl}}\n"
        "cluster: {device: cpu, isolation: none}\n"
    )
    return directory


def test_start_of_is_the_checkpoint_before_the_step(run_dir: Path) -> None:
    assert start_of(run_dir, 1) is None
    assert start_of(run_dir, 3) == run_dir / "checkpoints" / "step_2"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (2, "has no trajectories of step 2; steps that can be repeated: 1, 3. observe.keep_trajectories sets "),
        (4, "has no checkpoint of step 3, from whose weights step 4 starts; steps that can be repeated: 1, 3. "),
        (-1, "has no trajectories of step -1; "),
    ],
)
def test_start_of_other_steps_names_those_that_can_be_repeated(run_dir: Path, step: int, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        start_of(run_dir, step)
    assert str(raised.value).startswith(f"{run_dir} {message}")


def test_start_of_damaged_checkpoint_names_the_file(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step_2" / "state.json").write_text("[]")
    with pytest.raises(DamagedCheckpointError, match=r"step_2.*state\.json") as raised:
        start_of(run_dir, 3)
    assert raised.value.exit_code == 2


def debug_train(directory: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the last line of a command that is rejected."""
    assert cli.main(["debug", "train", str(directory), *words]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    return last


def test_debug_train_invalid_input_is_one_message(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != "run.lock"}
    said = debug_train(run_dir / "checkpoints", capsys, "--step", "3")
    assert said.endswith("it has no config.yaml; name a run.dir (see docs/run-directory.md)")
    assert "no trajectories of step 7" in debug_train(run_dir, capsys, "--step", "7")
    # Step 3 has a folder, but no files.
    assert "step_3/responses.safetensors cannot be read" in debug_train(run_dir, capsys, "--step", "3")
    assert "leave run.dir out" in debug_train(run_dir, capsys, "--step=3", "run.dir=x")
    assert "actor.optimiser" in debug_train(run_dir, capsys, "actor.optimiser.lr=1", "--step", "3")
    assert "sft trains on no responses" in debug_train(run_dir, capsys, "--step=3", "algorithm.policy_loss.name=sft")
    assert {path: path.stat().st_mtime_ns for path in before if path != run_dir} == {
        path: time for path, time in before.items() if path != run_dir
    }
    assert not (run_dir / "debug_train").exists()


def test_debug_train_run_without_trajectories_names_the_key(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "trajectories").rename(run_dir / "other")
    assert "set observe.keep_trajectories to the number of steps" in debug_train(run_dir, capsys, "--step", "1")


def test_debug_train_run_in_progress_is_rejected(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_lock(str(run_dir), print, print):
        assert f"run.dir={run_dir} is in use by process " in debug_train(run_dir, capsys, "--step", "3")


RECORDED = '{"step": 3, "actor/loss": 0.1}\n{"step": 4, "actor/loss": 0.25, "val/accuracy": 1, "actor/odd": null}\n'


def shown(step: int, recorded: dict[str, float] | None, repeated: dict[str, float]) -> str:
    console = Console(file=io.StringIO(), width=100)
    show_metrics(step, compare(recorded, repeated), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_show_metrics_counts_differences_of_recorded_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(RECORDED)
    recorded = recorded_metrics(tmp_path, 4)
    text = shown(4, recorded, {"actor/loss": 0.5, "actor/[b]": 2.0, "actor/odd": math.nan})
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:5]]
        for line in text.splitlines()
        if "│" in line
    }
    assert rows == {
        "actor/[b]": ["-", "2", "-"],
        "actor/loss": ["0.25", "0.5", "+0.25"],
        "actor/odd": ["-", "nan", "-"],
    }
    assert text.splitlines()[-1] == "1 of 1 metrics differ from the recorded ones"
    assert "all 1 metrics are equal" in shown(4, recorded, {"actor/loss": 0.25})


def test_show_metrics_of_a_step_that_failed_has_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(RECORDED)
    assert recorded_metrics(tmp_path, 5) is None
    assert "metrics.jsonl has no metrics of step 5 to compare with" in shown(5, None, {"actor/loss": 1.0})


def test_write_metrics_has_all_digits(tmp_path: Path) -> None:
    third = 1 / 3
    path = write_metrics(tmp_path, 4, ["a=b"], compare({"x": third}, {"x": third + 1e-16, "y": math.inf}))
    assert json.loads(path.read_text()) == {
        "step": 4,
        "overrides": ["a=b"],
        "metrics": {"x": {"recorded": third, "repeated": third + 1e-16}, "y": {"recorded": None, "repeated": None}},
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.baseline=role", r"^algorithm\.baseline=role needs the roles .* set it to prompt"),
        ("algorithm.baseline=source", r"need the training data, which is not read to repeat an update; remove them"),
        ("algorithm.per_source=[{source: math, weight: 2}]", r"^algorithm\.per_source, .* need the training data"),
    ],
)
def test_update_whose_estimates_need_the_rows_is_not_repeated(run_dir: Path, override: str, message: str) -> None:
    config = load_config(str(run_dir / "config.yaml"), [override])
    with pytest.raises(ConfigError, match=message):
        prepare_models(config)
