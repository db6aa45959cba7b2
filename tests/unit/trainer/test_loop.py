"""Order of calls in a step, and steps that a resumed run repeats; every part is a recorder."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from mcore_rl.config.schema import Config
from mcore_rl.errors import CheckpointError, NonFiniteError
from mcore_rl.ports import PendingSave
from mcore_rl.trainer.checkpoints import Checkpoints
from mcore_rl.trainer.loop import train
from mcore_rl.trainer.run import Run, save
from mcore_rl.types import BatchHandle, Metric, SavedFile, SavedState, Total


class Recorder:
    """Fake of every Protocol: records each call, and fails at the call `fail_at`, such as "update 2"."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.calls: list[str] = []
        self.stop_at: str | None = None
        self.fail_at, self.updates, self.position, self.rows = fail_at, 0, 0, {}
        self.pending: dict[str, Metric] = {}
        self.saves_last = False
        self.under_way = 0

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_at:
            raise NonFiniteError(call)

    def collect(self, step: int) -> str:
        self.position += 1
        self.note(f"collect {step}")
        return f"groups {step}"

    def recompute_logp(self, batch: object) -> BatchHandle:
        self.note(f"logp {batch}")
        return BatchHandle(batch, key=1, is_sent=True, metrics={"of/pass": Total(1)})

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        self.updates += 1
        self.note(f"update {handle.batch}")
        return {"actor/updates": Total(self.updates)}

    def publish(self, version: int) -> int:
        self.note(f"publish {version}")
        return version

    def verify(self) -> int:
        self.note("verify")
        return 5

    def validate(self, step: int) -> object:
        self.note(f"validate {step}")
        ones, parts = np.ones(2), {"format": np.array([0.5, np.nan])}
        return SimpleNamespace(
            group_ids=np.arange(2),
            accuracies=ones,
            rewards=ones,
            response_tokens=ones,
            scores={},
            errors=((1, "raised"),),
            parts=parts,
        )

    def start_save(self, directory: str, *, snapshot: bool) -> PendingSave:
        self.note("start save" if snapshot else "save")
        return RecordedSave(self, Path(directory), self.updates)

    def load(self, directory: str, files: object) -> None:
        assert {file.name for file in files} == {"updates", "state.json"}
        self.note("load")
        self.updates = int(Path(directory, "updates").read_text())

    def record(self, metrics: dict[str, Metric]) -> None:
        self.pending.update(metrics)

    def finish_step(self, step: int) -> None:
        self.note(f"figures {step}")
        self.rows[step] = {name: metric.value for name, metric in self.pending.items()}
        self.pending = {}

    def resume_after(self, step: int) -> None:
        self.note(f"resume after {step}")

    def close(self, *, failed: bool = False) -> None: ...

    def begin(self, step: int) -> None:
        self.under_way = step

    def requested(self) -> bool:
        return self.stop_at is not None and self.stop_at in self.calls

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@dataclass
class RecordedSave:
    """Save that writes the number of updates at its start; with saves_last, the number when it is waited for."""

    part: Recorder
    directory: Path
    updates: int

    def done(self) -> bool:
        return not self.part.saves_last

    def result(self) -> SavedState:
        if self.part.saves_last:
            self.part.note("written")
        (self.directory / "updates").write_text(str(self.updates))
        return SavedState((SavedFile("updates", len(str(self.updates)), crc32(str(self.updates).encode())),), {})


def make(tmp_path: Path, steps: int, part: Recorder, every: int = 2, *, async_save: bool = False) -> Run:
    config = Config()
    config.checkpoint.async_save = async_save
    config.trainer.steps, config.trainer.validate_every_steps = steps, 2
    config.checkpoint.every_steps, config.weights.verify_every = every, 3
    return Run(
        config=config,
        actor=part,
        collector=part,
        publisher=part,
        validator=part,
        journal=part,
        checkpoints=Checkpoints(tmp_path / "checkpoints", 2),
        remove_unfinished=lambda: part.note("remove unfinished"),
        positions={"sampler": part},
        batch_of=lambda groups, step, version: step,  # type: ignore[arg-type, return-value]
        describe=lambda groups: {},
        stops=part,
    )


def trained(tmp_path: Path, steps: int, fail_at: str | None = None, **options: Any) -> Recorder:
    """Train until the end or the failure at `fail_at`."""
    part = Recorder(fail_at)
    with pytest.raises(NonFiniteError, match=fail_at) if fail_at else nullcontext():
        train(make(tmp_path, steps, part, **options))
    return part


def test_train_calls_parts_in_order(tmp_path: Path) -> None:
    part = trained(tmp_path, 3)
    assert part.calls == [
        *("remove unfinished", "resume after -1", "publish 0", "validate 0", "figures 0"),
        *("collect 1", "logp 1", "update 1", "publish 1", "figures 1"),
        *("collect 2", "logp 2", "update 2", "publish 2", "validate 2", "figures 2", "save"),
        *("collect 3", "logp 3", "update 3", "publish 3", "verify", "validate 3", "figures 3", "save"),
    ]
    assert (part.rows[3]["val/format"], part.rows[3]["val/errors"]) == (0.5, 1)
    assert part.rows[3]["rollout/version"] == 2  # the version that generated, not the one just published


def test_train_batch_has_the_version_of_its_step(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for steps in (2, 4):
        run = make(tmp_path, steps, Recorder())
        run.batch_of = lambda groups, step, version: seen.append((step, version))  # type: ignore[assignment]
        train(run)
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_train_reference_runs_between_logp_and_estimate(tmp_path: Path) -> None:
    part = Recorder()
    run = make(tmp_path, 1, part)

    class Recorded:
        def apply(self, actor: object, groups: object, logp: BatchHandle) -> BatchHandle:
            part.note(f"compare {groups}")
            metrics = {**logp.metrics, "reward/kl": Total(3)}
            return replace(logp, batch=f"{logp.batch} less KL", metrics=metrics)  # type: ignore[arg-type]

        def refresh(self, actor: object, step: int) -> None:
            part.note(f"refresh {step}")

    run.reference = Recorded()  # type: ignore[assignment]
    train(run)
    start = part.calls.index("collect 1")
    wanted = ["logp 1", "compare groups 1", "update 1 less KL", "refresh 1", "publish 1"]
    assert part.calls[start + 1 : start + 6] == wanted
    assert part.rows[1]["reward/kl"] == 3
    assert part.rows[1]["of/pass"] == 1


@pytest.mark.parametrize("fail_at", ["collect 3", "logp 3", "update 3", "publish 3", "figures 3", "save"])
def test_train_resumed_run_ends_the_same(tmp_path: Path, fail_at: str) -> None:
    whole = trained(tmp_path / "whole", 4)
    trained(tmp_path / "broken", 4, fail_at)
    resumed = trained(tmp_path / "broken", 4)
    first = 1 if fail_at == "save" else 3
    assert [call for call in resumed.calls if call.startswith("collect")] == [
        f"collect {step}" for step in range(first, 5)
    ]
    assert ("validate 0" in resumed.calls) == (first == 1)
    for step in range(first, 5):
        assert resumed.rows[step] == whole.rows[step]
    assert resumed.position == whole.position


def test_save_stores_accuracy_of_validated_steps(tmp_path: Path) -> None:
    run = make(tmp_path, 4, Recorder(), every=1)
    run.checkpoints.keep_last = 4
    train(run)
    states = [run.checkpoints.read(tmp_path / "checkpoints" / f"step_{step}")[0] for step in (1, 2, 3, 4)]
    assert [state["accuracy"] for state in states] == [None, 1.0, None, 1.0]


def test_steps_left_marks_the_current_step(tmp_path: Path) -> None:
    part = Recorder()
    seen: list[int] = []
    run = make(tmp_path, 3, part)
    run.describe = lambda groups: seen.append(part.under_way) or {}  # type: ignore[func-returns-value]
    assert part.under_way == 0
    train(run)
    assert seen == [1, 2, 3]


def test_train_finished_run_does_nothing(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    assert trained(tmp_path, 2).calls == ["remove unfinished", "load", "resume after 2", "publish 2"]


@pytest.mark.parametrize("stop_at", ["collect 1", "figures 1"])
def test_train_stop_request_saves_and_resumes(tmp_path: Path, stop_at: str) -> None:
    whole = trained(tmp_path / "whole", 4)
    stopped = Recorder()
    stopped.stop_at = stop_at
    assert not train(make(tmp_path / "stopped", 4, stopped))
    assert stopped.calls[-2:] == ["figures 1", "save"]
    resumed = Recorder()
    assert train(make(tmp_path / "stopped", 4, resumed))
    assert [call for call in resumed.calls if call.startswith("collect")] == ["collect 2", "collect 3", "collect 4"]
    assert {step: resumed.rows[step] for step in (2, 3, 4)} == {step: whole.rows[step] for step in (2, 3, 4)}


def test_train_stop_request_in_last_step_finishes(tmp_path: Path) -> None:
    part = Recorder()
    part.stop_at = "collect 2"
    assert train(make(tmp_path, 2, part))
    assert part.calls[-2:] == ["figures 2", "save"]


def test_train_failed_update_publishes_nothing(tmp_path: Path) -> None:
    part = trained(tmp_path, 2, "update 1", every=1)
    assert part.calls[-1] == "update 1"
    assert not (tmp_path / "checkpoints").exists()


def test_train_async_save_overlaps_steps(tmp_path: Path) -> None:
    part = Recorder()
    part.saves_last = True
    train(make(tmp_path, 5, part, async_save=True))
    phases = [call for call in part.calls if call.startswith(("update", "start save", "written"))]
    assert phases == [
        *("update 1", "update 2", "start save", "update 3", "update 4", "written", "start save", "update 5"),
        *("written", "start save", "written"),
    ]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_4", "step_5"]
    assert (tmp_path / "checkpoints" / "step_4" / "updates").read_text() == "4"


def test_train_async_save_is_completed_at_the_next_step(tmp_path: Path) -> None:
    trained(tmp_path, 6, "collect 4", async_save=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


@pytest.mark.parametrize(("fail_at", "complete"), [("update 3", ["step_2"]), ("written", [])])
def test_train_failure_completes_the_running_save(tmp_path: Path, fail_at: str, complete: list[str]) -> None:
    part = Recorder(fail_at)
    part.saves_last = True
    with pytest.raises(NonFiniteError, match=fail_at):
        train(make(tmp_path, 4, part, async_save=True))
    found = [path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith(".")]
    assert found == complete


def test_save_between_steps_skips_a_saved_step(tmp_path: Path) -> None:
    part = Recorder()
    run = make(tmp_path, 2, part)
    train(run)
    calls = list(part.calls)
    save(run)
    assert part.calls == calls
    run.state = run.state.finished(3, 3)
    save(run)
    assert part.calls == [*calls, "save"]


def test_load_latest_other_kind_of_run_is_rejected(tmp_path: Path) -> None:
    train(make(tmp_path, 2, Recorder()))
    run = make(tmp_path, 2, Recorder())
    run.positions["another"] = Recorder()
    with pytest.raises(CheckpointError, match="a different kind of run"):
        train(run)


def test_load_latest_other_objective_is_rejected(tmp_path: Path) -> None:
    """Supervised training, pairs and a warm start have the same positions."""
    for steps, objective in ((2, "rl"), (4, "sft")):
        run = make(tmp_path, steps, Recorder())
        run.config.trainer.objective = objective
        if steps == 2:
            train(run)
    message = r"run with trainer\.objective=rl, but this run has trainer\.objective=sft: restore the key, or set run"
    with pytest.raises(CheckpointError, match=message):
        train(run)


def test_load_latest_without_an_objective_resumes(tmp_path: Path) -> None:
    class Earlier(Checkpoints):
        """Checkpoints of a version that stored no objective."""

        @staticmethod
        def read(path: Path) -> Any:
            state, files = Checkpoints.read(path)
            del state["objective"]
            return state, files

    train(make(tmp_path, 2, Recorder()))
    part = Recorder()
    run = make(tmp_path, 4, part)
    run.checkpoints = Earlier(tmp_path / "checkpoints", 2)
    train(run)
    assert part.updates == 4


@pytest.mark.parametrize(
    ("part", "before", "message"),
    [
        ("kl_controller", True, r"has an adaptive .* has none: restore algorithm\.kl\.controller, or"),
        ("entropy_controller", False, r"no adaptive entropy .* restore algorithm\.entropy_control\.target, or"),
        ("kl_controller", False, r"has no .* has one: restore algorithm\.kl\.controller, or"),
        ("critic", True, "has a critic, but this run has none;"),
        ("critic", False, "has no .* one;"),
    ],
)
def test_load_latest_other_parts_are_rejected(tmp_path: Path, part: str, before: bool, message: str) -> None:
    for steps, present in ((2, before), (4, not before)):
        run = make(tmp_path, steps, Recorder())
        if present and part == "critic":
            run.critic = Recorder()  # type: ignore[assignment]
        elif present:
            run.positions[part] = Recorder()
        if steps == 2:
            train(run)
    with pytest.raises(CheckpointError, match=rf"{message} set run\.dir to a new directory"):
        train(run)


class RecordedProfiler:
    """Profiler that records its calls among those of `part`."""

    def __init__(self, part: Recorder) -> None:
        self.part = part

    def begin(self, step: int) -> None:
        self.part.note(f"begin profile {step}")

    def end(self, step: int) -> None:
        self.part.note(f"end profile {step}")


def test_train_profile_covers_the_step_without_validation(tmp_path: Path) -> None:
    part = Recorder()
    run = make(tmp_path, 2, part)
    run.profiler = RecordedProfiler(part)
    train(run)
    training = ("collect 2", "logp 2", "update 2", "publish 2")
    start = part.calls.index("begin profile 2")
    assert part.calls[start:] == ["begin profile 2", *training, "end profile 2", "validate 2", "figures 2", "save"]


def test_train_stopped_step_has_a_profile_and_a_failed_one_has_none(tmp_path: Path) -> None:
    stopped, failed = Recorder(), Recorder("update 1")
    stopped.stop_at = "collect 1"
    for part, name in ((stopped, "stopped"), (failed, "failed")):
        run = make(tmp_path / name, 4, part)
        run.profiler = RecordedProfiler(part)
        with pytest.raises(NonFiniteError) if part is failed else nullcontext():
            train(run)
    assert "end profile 1" in stopped.calls
    assert "begin profile 2" not in stopped.calls
    assert failed.calls[-1] == "update 1"
