"""Engines that die in other phases and numbers than in test_failures.py: metrics and records stay the same."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.rollout.journal import read_journal
from tests.e2e.runs import ENGINE, TrainProcess, assert_same_records, in_step, metrics, train

pytestmark = pytest.mark.slow

RESTARTS = "engine/restarts"
TAKEN_OVER = "engine/tokens_taken_over"
COMPARED = "weights/tensors_verified"
"""Counts tensors on running engines only, so it differs between the runs."""


def without_restarts(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {
        step: {k: v for k, v in row.items() if k not in (RESTARTS, TAKEN_OVER, COMPARED)}
        for step, row in metrics(run_dir).items()
    }


def total(run_dir: Path, name: str) -> float:
    return sum(row.get(name, 0) for row in metrics(run_dir).values())


def restarts(run_dir: Path) -> float:
    return total(run_dir, RESTARTS)


def assert_same_run(run_dir: Path, other: Path) -> None:
    assert without_restarts(run_dir) == without_restarts(other)
    assert_same_records(run_dir, other)


def every_group_once(run_dir: Path, samples: int) -> bool:
    """Return whether the training records of all steps contain every response exactly once."""
    files = (run_dir / "rollouts").glob("step_*.jsonl")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    counts = Counter((record["group"], record["sample"]) for record in records)
    groups = 1 + max(group for group, _ in counts)
    return counts == {(group, sample): 1 for group in range(groups) for sample in range(samples)}


def engine_of(run: TrainProcess) -> psutil.Process:
    """Wait for the run's only engine. The search takes longer than a response."""
    (engine,) = run.wait_until(lambda: run.processes(ENGINE))
    return engine


def in_midst_of_responses(run_dir: Path) -> bool:
    """Return whether the newest journal has unfinished training responses, which another engine can continue."""
    journals = sorted((run_dir / "journals").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    drawn = read_journal(journals[-1]) if journals else {}
    return any(name.startswith("train.") and drawn[name].finish_reason is None for name in drawn)


def suspend_in_midst_of_responses(run: TrainProcess, engine: psutil.Process, step: int) -> None:
    """Suspend the engine in the middle of the training responses of a step.

    It runs for a few milliseconds at a time, which is too short for whole responses. Before that it runs half of the
    time, so that a test process that gets no core misses nothing while the engine is suspended.
    """
    before = run.run_dir / "rollouts" / f"step_{step - 1}.jsonl"
    engine.suspend()
    while not ((begun := step == 1 or before.exists()) and in_midst_of_responses(run.run_dir)):
        assert run.process.poll() is None, run.text()[-4000:]
        on, off = (0.005, 0.05) if begun else (0.02, 0.02)
        engine.resume()
        time.sleep(on)
        engine.suspend()
        time.sleep(off)


def assert_kept_is_what_is_referred_to(run_dir: Path) -> None:
    """Check during a step that the journal still has the last step's groups, but no older groups and no validation."""
    (journal,) = (run_dir / "journals").iterdir()
    kept = {tuple(name.split(".")[:2]) for name in read_journal(journal)}
    steps = len(list((run_dir / "rollouts").glob("step_*.jsonl")))
    before, last = (
        {("train", str(json.loads(line)["group"])) for line in records.read_text().splitlines()}
        for records in (run_dir / "rollouts" / f"step_{step}.jsonl" for step in (steps - 1, steps))
    )
    assert last <= kept
    assert not before & kept
    assert "val" not in {prompt_set for prompt_set, _ in kept}


ADAPTERS = ("actor.lora.rank=4", "actor.lora.alpha=16", "actor.optimizer.lr=1e-2")
"""Overrides with which most weights are frozen: engines receive them only once (weights/frozen.py)."""


@pytest.fixture(scope="module", params=[(), ADAPTERS], ids=["full", "adapters"])
def undisturbed(
    request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[str, ...]]:
    """Run directory of an undisturbed run, and its overrides."""
    if not request.param:
        return request.getfixturevalue("whole_run"), ()
    directory = tmp_path_factory.mktemp("adapters") / "run"
    train(task, directory, *request.param)
    return directory, request.param


@pytest.mark.on_demand  # test_failures.py kills an engine amid responses
def test_engine_that_dies_during_an_update_starts_again(
    task: Path, undisturbed: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    run_dir, (expected, overrides) = tmp_path / "run", undisturbed
    with TrainProcess(task, run_dir, overrides) as run:
        run.wait_until(in_step(run, 3, "updating"))
        run.kill_one(ENGINE)
        assert run.finish() == 0, run.text()[-4000:]
        assert "rollout engine 0 died" in run.text()
        assert "it starts again (1 of 3 times)" in run.text()
        assert not run.left_after(30)
    assert (restarts(run_dir), total(run_dir, TAKEN_OVER)) == (1, 0)
    assert not (run_dir / "journals").exists()
    assert_same_run(run_dir, expected)


BY_TURNS = tuple(f"actor.offload.{part}=true" for part in ("params", "grads", "optimizer"))
"""Engines and trainer ranks alternate on their devices, as when colocated on GPUs."""


GATED_REWARD = """
import pathlib
import sys
import time

sys.path.insert(0, {task!r})
from reward import digits

def gated(*arguments, **named):
    metrics, gate = pathlib.Path({metrics!r}), pathlib.Path({gate!r})
    while metrics.exists() and '"step": {step}' in metrics.read_text() and not gate.exists():
        time.sleep(0.05)
    return digits(*arguments, **named)
"""
"""Reward function that blocks the step after `step` until the gate file exists, so that the test controls its end."""


def write_gated_reward(task: Path, run_dir: Path, step: int) -> tuple[tuple[str, ...], Path]:
    """Write the reward function; return the overrides that use it, and the gate file."""
    gate, reward = run_dir.parent / "gate", run_dir.parent / "gated.py"
    paths = {"task": str(task.parent), "metrics": str(run_dir / "metrics.jsonl"), "gate": str(gate)}
    reward.write_text(GATED_REWARD.format(step=step, **paths))
    return (f"reward.function={reward}:gated", "reward.timeout_seconds=100"), gate


@pytest.mark.on_demand  # the waits, the pool and the phases have unit tests
@pytest.mark.parametrize("overrides", [BY_TURNS, ()])
def test_an_engine_stopped_between_generation_and_fetch_is_replaced(
    task: Path, whole_run: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """The trainer ranks are suspended during generation until the engine is suspended.

    With shared devices, the engine is asleep by then.
    """
    run_dir = tmp_path / "run"
    gated, gate = write_gated_reward(task, run_dir, step=2)
    overrides = (*overrides, *gated)
    # The timeout must be long enough that suspended trainer ranks do not exceed it, also on a busy machine.
    with TrainProcess(task, run_dir, ("cluster.collective_timeout_seconds=30", *overrides)) as run:
        (engine,) = run.wait_until(lambda: run.processes(ENGINE))
        run.wait_until(in_step(run, 3, "generating"))
        trainers = run.processes("ray::TrainerProcess")
        for trainer in trainers:
            trainer.suspend()
        gate.touch()
        run.wait_until((run_dir / "rollouts" / "step_3.jsonl").exists)
        time.sleep(3)  # until the engine sleeps and the ranks have received the fetch call
        engine.suspend()
        for trainer in trainers:
            trainer.resume()
        assert run.finish() == 0, run.text()[-4000:]
        assert "rollout engine 0 did not answer for 30 s" in run.text()
        assert "; it starts again (1 of 3 times)" in run.text()
        assert not run.left_after(30)
    assert restarts(run_dir) == 1
    figures, expected = without_restarts(run_dir), without_restarts(whole_run)
    for step, row in figures.items():
        assert {name: value for name, value in row.items() if not name.startswith("memory/")} == expected[step]


@pytest.mark.on_demand  # test_async_run also loses one of two engines
def test_of_several_engines_one_dies_and_takes_part_again_when_it_is_up(
    task: Path, undisturbed: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    """The trainer is suspended one step after the engine's death until the engine has restarted.

    The metrics equal those of a run with one engine.
    """
    run_dir, (expected, overrides) = tmp_path / "run", undisturbed
    with TrainProcess(task, run_dir, ("rollout.num_engines=2", *overrides)) as run:
        run.wait_until(lambda: "sending the initial weights to the engines" in run.text())
        (trainer, *_), engines = run.processes("ray::TrainerProcess"), run.processes(ENGINE)
        run.wait_until((run_dir / "rollouts" / "step_1.jsonl").exists)
        engines[1].kill()
        run.wait_until((run_dir / "rollouts" / "step_3.jsonl").exists)
        trainer.suspend()
        (again,) = run.wait_until(lambda: [e for e in run.processes(ENGINE) if e not in engines])
        run.wait_until(lambda: f"{ENGINE}.serve" in " ".join(again.cmdline()))  # its set-up is complete
        trainer.resume()
        assert run.finish() == 0, run.text()[-4000:]
        said = run.text()
        assert said.index("step 2/4") < said.index("is up again, with the weights of version")  # training did not wait
        assert not run.left_after(30)
    assert restarts(run_dir) == 1
    assert every_group_once(run_dir, samples=4)
    assert_same_run(run_dir, expected)
