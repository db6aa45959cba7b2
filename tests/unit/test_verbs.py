"""Starting a finished run returns at once."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcore_rl import verbs
from mcore_rl.config import Config, load_config
from mcore_rl.errors import DamagedCheckpointError, McoreRLError, RunDirLostError
from mcore_rl.observe.third_party import ThirdPartyLog
from mcore_rl.trainer.checkpoints import Checkpoints
from mcore_rl.trainer.copies import copy_all
from mcore_rl.types import SavedState

ANSWER = """
import sys
from mcore_rl.cli import main
code = main(sys.argv[1:])
print(*({"torch", "ray", "megatron"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


SAVED: Any = SimpleNamespace(done=lambda: True, result=lambda: SavedState((), {}))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Run directory after 4 steps."""
    directory = tmp_path / "run"
    Checkpoints(directory / "checkpoints", keep_last=1).save(4, {}, lambda path: SAVED)
    rows = [{"step": 0, "val/accuracy": 0.25}, {"step": 2, "val/accuracy": 0.75}, {"step": 4, "val/accuracy": 0.5}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text("data: {train: nowhere.jsonl}\nmodel: {hf_path: nowhere}\n")
    return directory


def train(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    arguments = ["train", str(run_dir.parent / "config.yaml"), f"run.dir={run_dir}", *overrides]
    return subprocess.run([sys.executable, "-c", ANSWER, *arguments], capture_output=True, text=True, check=False)


def test_train_finished_run_writes_a_missing_report_only(run_dir: Path) -> None:
    report = run_dir / "report.html"
    assert f"report: {report}" in train(run_dir, "trainer.steps=4").stdout.splitlines()
    report.write_text("kept")
    assert f"report: {report}" in train(run_dir, "trainer.steps=4").stdout.splitlines()
    assert report.read_text() == "kept"


def test_report_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    assert verbs._report(tmp_path / "missing").startswith("report: not written: ")


@pytest.mark.parametrize("steps", [4, 3])
def test_train_finished_run_ends_before_heavy_imports(run_dir: Path, steps: int) -> None:
    done = train(run_dir, f"trainer.steps={steps}")
    assert (done.returncode, done.stderr.strip()) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"step {steps} of {steps} is done; raise trainer.steps to continue"
    assert any("0.750 (step 2)" in line and "+0.250" in line for line in lines)
    checkpoint = run_dir / "checkpoints" / "step_4"
    assert lines[-1] == f"Hugging Face model: python -m model_converters to-hf --ckpt {checkpoint} --out DIR"


def is_finished(run_dir: Path, *overrides: str) -> bool:
    config = load_config(str(run_dir.parent / "config.yaml"), [f"run.dir={run_dir}", *overrides])
    return verbs.is_finished(Path(config.run.dir), config.trainer)


def test_an_export_that_is_asked_for_later_is_left_to_do(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "exported"
    assert not is_finished(run_dir, "trainer.steps=4", f"trainer.export_hf={target}")
    assert capsys.readouterr().err == f"step 4 of 4 is done; still to export: trainer.export_hf={target}\n"
    target.mkdir()
    assert is_finished(run_dir, "trainer.steps=4", f"trainer.export_hf={target}")


def test_a_resume_says_so_and_a_first_start_says_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_finished(run_dir, "trainer.steps=5")
    assert capsys.readouterr().err == f"resuming from step_4 in {run_dir}\n"
    assert not is_finished(run_dir.parent / "new", "trainer.steps=5", f"run.dir={run_dir.parent / 'new'}")
    assert capsys.readouterr().err == ""


def test_train_finished_run_quotes_the_path_in_its_command(tmp_path: Path) -> None:
    directory = tmp_path / "my $run; (1)"
    Checkpoints(directory / "checkpoints", keep_last=1).save(4, {}, lambda path: SAVED)
    words = shlex.split(verbs._export_hint(Config(), directory))
    assert words[-4:] == ["--ckpt", str(directory / "checkpoints" / "step_4"), "--out", "DIR"]


def test_train_damaged_proof_is_one_message_with_exit_code_2(run_dir: Path) -> None:
    proof = run_dir / "checkpoints" / "step_4" / "complete.json"
    proof.write_text(proof.read_text().replace("state.json", "state.jsom", 1))
    done = train(run_dir, "trainer.steps=6")
    assert done.returncode == 2
    message, rest = done.stderr.split("\n", 1)
    assert "step_4 is damaged: complete.json cannot be read (it has another checksum than was saved)" in message
    assert message.endswith("there is no older one: remove step_4 to start over")
    assert "Traceback" not in rest


def test_train_damaged_block_is_found_before_processes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(str(run_dir.parent / "config.yaml"), [f"run.dir={run_dir}", "trainer.steps=6"])
    inputs = SimpleNamespace(checkpoint_bytes=0, lines=())
    monkeypatch.setattr("mcore_rl.preparation.prepare.prepare", lambda config: inputs)
    monkeypatch.setattr("mcore_rl.assembly.assemble", lambda *_: pytest.fail("processes were started"))
    state = run_dir / "checkpoints" / "step_4" / "state.json"
    state.write_bytes(b"[]")  # same size as saved
    assert state.stat().st_size == 2
    with pytest.raises(DamagedCheckpointError, match=r"step_4 is damaged: state\.json has another checksum"):
        verbs._train_locked(config, "", cast(ThirdPartyLog, None), verbs.Start(print, lambda: None))


def test_train_start_prints_directory_logs_and_how_to_resume(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(str(run_dir.parent / "config.yaml"), [f"run.dir={run_dir}", "trainer.steps=6"])
    inputs, lines = SimpleNamespace(checkpoint_bytes=0, lines=()), list[str]()

    def stop(*_: object) -> None:
        raise McoreRLError("processes are not started")

    monkeypatch.setattr("mcore_rl.preparation.prepare.prepare", lambda config: inputs)
    monkeypatch.setattr("mcore_rl.assembly.assemble", stop)
    # An error of an earlier start.
    (run_dir / "failure.txt").write_text("a rank died")
    for attempt in ("logs/attempt_1", "logs/attempt_2"):
        lines.clear()
        with pytest.raises(McoreRLError, match="not started"):
            verbs._train_locked(config, "resume with: it", ThirdPartyLog(), verbs.Start(lines.append, lambda: None))
        assert lines == [f"run directory: {run_dir}, output of its processes: {attempt}", "resume with: it"]
        assert (run_dir / attempt).is_dir()
    assert not (run_dir / "failure.txt").exists()


def test_train_without_checkpoint_fetches_the_newest_copy(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, new = run_dir.parent / "copies", run_dir.parent / "new"
    copy_all(str(copies), run_dir / "checkpoints")
    overrides = [f"run.dir={new}", f"checkpoint.copy_to={copies}", "trainer.steps=6"]
    config = load_config(str(run_dir.parent / "config.yaml"), overrides)

    def stop(*_: object) -> None:
        raise McoreRLError("processes are not started")

    monkeypatch.setattr(
        "mcore_rl.preparation.prepare.prepare", lambda config: SimpleNamespace(checkpoint_bytes=0, lines=())
    )
    monkeypatch.setattr("mcore_rl.assembly.assemble", stop)
    with pytest.raises(McoreRLError, match="not started"):
        verbs._train_locked(config, "resume with: it", ThirdPartyLog(), verbs.Start(lambda line: None, lambda: None))
    assert [path.name for path in (new / "checkpoints").iterdir()] == ["step_4"]


def test_train_failed_run_prints_how_to_resume(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise McoreRLError("a rank died")

    config = load_config(str(run_dir.parent / "config.yaml"), [f"run.dir={run_dir}", "trainer.steps=6"])
    monkeypatch.setattr(verbs, "locked", fail)
    with pytest.raises(McoreRLError, match="a rank died"):
        verbs.train(config, "resume with: it")
    assert capsys.readouterr().err.splitlines()[-1] == "step 4 is saved; resume with: it"
    assert (run_dir / "report.html").exists()
    assert (run_dir / "failure.txt").read_text() == "a rank died"


def test_train_lost_directory_is_left_to_its_new_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunDirLostError("taken by process 7")

    config = load_config(str(run_dir.parent / "config.yaml"), [f"run.dir={run_dir}", "trainer.steps=6"])
    monkeypatch.setattr(verbs, "locked", fail)
    with pytest.raises(RunDirLostError):
        verbs.train(config, "resume with: it")
    assert not (run_dir / "report.html").exists()
