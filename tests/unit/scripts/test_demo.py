"""`make demo` skips complete stages, resumes the others, and reports the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import demo
import demo_task
import pytest
import yaml

ROOT = demo.ROOT
WORK3 = demo.DEMOS["work3"]


def write_run(root: Path, steps: int, accuracies: dict[int, float], directory: str = WORK3.run) -> None:
    run = root / directory
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"trainer": {"steps": steps}}))
    rows = [{"step": step, "reward/mean": 0.5} for step in range(steps)]
    rows += [{"step": step, "val/accuracy": accuracy} for step, accuracy in accuracies.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(root: Path) -> None:
    config = root / WORK3.config
    config.parent.mkdir()
    config.write_text(yaml.safe_dump({"run": {"dir": WORK3.run}, "data": {"train": "t"}, "model": {"hf_path": "m"}}))


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run the demo in an empty directory, record its training runs, and write their results."""
    made: list[list[str]] = []

    def train(arguments: list[str]) -> None:
        made.append(arguments)
        if arguments[0] == demo.WARM_START_CONFIG:
            exported = tmp_path / arguments[-1].removeprefix("trainer.export_hf=")
            exported.mkdir()
            (exported / "config.json").write_text("{}")
            (exported / "model.safetensors").write_text("")
        else:
            own = next(each.run for each in demo.DEMOS.values() if each.config == arguments[0])
            directory = next((each.removeprefix("run.dir=") for each in arguments if "run.dir=" in each), own)
            write_run(tmp_path, 30, {0: 0.25, 30: 0.75}, directory)

    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "train", train)
    return made


def test_first_run_warm_starts_then_trains_and_the_second_does_neither(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main([])
    assert [arguments[0] for arguments in calls] == [demo.WARM_START_CONFIG, WORK3.config]
    assert "0.750" in capsys.readouterr().out
    demo.main([])
    assert len(calls) == 2
    text = capsys.readouterr().out
    assert "+0.500" in text
    assert f"rm -r {WORK3.run}" in text


def test_settings_go_to_the_dapo_run_alone_and_make_a_finished_one_go_on(
    calls: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path)
    assert demo.main(["trainer.stesp=60"]) == 2
    assert "trainer.steps" in capsys.readouterr().err
    assert calls == []
    demo.main([])
    demo.main(["trainer.steps=60"])
    assert calls[0][0] == demo.WARM_START_CONFIG
    assert calls[1:] == [[WORK3.config], [WORK3.config, "trainer.steps=60"]]
    demo.main(["run.dir=runs/elsewhere", "trainer.steps=2"])
    assert "run directory  runs/elsewhere" in capsys.readouterr().out


def test_another_engine_has_a_run_of_its_own_from_the_same_warm_start(
    calls: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path)
    demo.main([])
    demo.main(["--engine", "sglang"])
    assert calls[2:] == [[WORK3.config, f"run.dir={WORK3.run}_sglang", "rollout.engine=sglang"]]
    assert f"run directory  {WORK3.run}_sglang" in capsys.readouterr().out
    demo.main(["--engine", "sglang"])  # the run is complete
    assert len(calls) == 3


@pytest.mark.parametrize("engine", [[], ["--engine", "sglang"]])
def test_demo_with_its_own_engine_needs_no_override(calls: list[list[str]], tmp_path: Path, engine: list[str]) -> None:
    latent = demo.DEMOS["latent"]
    demo.main(["--task", "latent", *engine])
    assert calls[1:] == [[latent.config]]
    assert yaml.safe_load((ROOT / latent.config).read_text())["rollout"]["engine"] == latent.engine


def test_fsdp2_demo_trains_a_dense_model_in_both_stages(calls: list[list[str]]) -> None:
    dense = demo.DEMOS["work3 fsdp2"]
    demo.main(["--strategy", "fsdp2"])
    assert calls[1:] == [[dense.config]]
    assert calls[0] == dense.warm_start_arguments()
    assert "actor.strategy=fsdp2" in calls[0]
    assert yaml.safe_load((ROOT / dense.config).read_text())["actor"]["strategy"] == "fsdp2"


def test_an_interrupted_run_is_resumed_without_a_new_warm_start(calls: list[list[str]], tmp_path: Path) -> None:
    demo.main([])
    write_run(tmp_path, 30, {0: 0.25, 10: 0.5})
    demo.main([])
    assert [arguments[0] for arguments in calls[2:]] == [WORK3.config]


def test_an_export_without_weights_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not demo.is_exported(tmp_path)


def test_a_step_validated_again_after_a_resume_counts_once() -> None:
    rows = [{"step": 10, "val/accuracy": 0.3}, {"step": 0, "val/accuracy": 0.1}, {"step": 10, "val/accuracy": 0.4}]
    assert [(row["step"], row["val/accuracy"]) for row in demo.validations(rows)] == [(0, 0.1), (10, 0.4)]


@pytest.mark.parametrize("name", sorted(demo.DEMOS))
def test_configurations_read_what_the_demo_writes(name: str) -> None:
    it = demo.DEMOS[name]
    config = yaml.safe_load((Path(demo.__file__).parents[1] / it.config).read_text())
    assert config["run"]["dir"] == it.run
    assert config["model"]["hf_path"] == it.exported
    for value in (config["data"]["train"], config["data"]["val"]):
        assert Path(value).parent == Path(it.data)


def test_a_failed_training_run_ends_the_demo_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "mcore-rl"
    command.write_text("#!/bin/sh\nexit 2\n")
    command.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit) as stopped:
        demo.train(["x.yaml"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_a_signal_is_passed_to_the_run_which_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    command = tmp_path / "mcore-rl"
    command.write_text(f"#!/bin/sh\ntrap 'exit {code}' {name}\nkill -{name} $PPID\nwhile :; do sleep 0.1; done\n")
    command.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit) as stopped:
        demo.train(["x.yaml"])
    assert stopped.value.code == code


def test_names_of_tasks_agree() -> None:
    assert {each.task for each in demo.DEMOS.values()} == set(demo_task.TASKS)


def test_a_mode_that_a_task_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--task", "game", "--mode", "async"])
    assert "--mode async has no --task game" in capsys.readouterr().err


def test_distillation_warm_starts_teacher_and_student(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main(["--task", "distill"])
    assert [arguments[0] for arguments in calls] == [*[demo.WARM_START_CONFIG] * 2, "configs/demo_distill_cpu.yaml"]
    teacher, student = ({word.partition("=")[0]: word.partition("=")[2] for word in call[1:]} for call in calls[:2])
    assert teacher["trainer.export_hf"] == "runs/demo_task/dense/teacher"
    assert student["trainer.export_hf"] == "runs/demo_task/work3/warm_start"
    config = yaml.safe_load((Path(demo.__file__).parents[1] / "configs/demo_distill_cpu.yaml").read_text())
    assert config["teacher"]["hf_path"] == teacher["trainer.export_hf"]
    assert config["model"]["hf_path"] == student["trainer.export_hf"]
    assert "rm -r runs/demo_distill " in capsys.readouterr().out
    demo.main(["--task", "distill"])
    assert len(calls) == 3
