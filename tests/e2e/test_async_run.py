"""Asynchronous runs: after any death, no group is lost, trained twice, or older than the staleness limit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.rollout.journal import read_journal
from tests.e2e.runs import ENGINE, TrainProcess, assert_same_records, in_step, metrics, records_of, train
from tests.e2e.test_engine_loss import restarts
from tests.e2e.test_judge_run import OVERRIDES as JUDGED
from tests.e2e.test_judge_run import PARSER, write_judge
from tests.e2e.test_reward_model_run import RULE_WEIGHT, SCORE_WEIGHT, digits_share, write_scorer
from tests.e2e.test_scored_run import PPO

pytestmark = pytest.mark.slow

APART = ("cluster.placement=disaggregated", "actor.num_ranks=2", "trainer.steps=6")
AHEAD = (
    *APART,
    *("rollout.max_staleness=2", "rollout.num_engines=2", "cluster.gpus_per_node=4", "rollout.max_response_tokens=48"),
    *("actor.tokens_per_microbatch=512", "algorithm.policy_loss.name=decoupled_ppo"),
)
ONE_RANK = ("actor.num_ranks=1", "actor.parallel.ep=1", "cluster.gpus_per_node=3")
ONE_STEP_OFF = (
    *APART,
    *("rollout.max_staleness=1", "rollout.max_staleness_hard=1", "rollout.swap=finish", "cluster.gpus_per_node=3"),
)
SIZE, SAMPLES = 8, 4
HARD = 4
QUEUES = ("async/", "staleness/", "engine/")


def records(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the rollout records of each step."""
    steps = sorted(int(path.stem.removeprefix("step_")) for path in (run_dir / "rollouts").glob("step_*.jsonl"))
    return {step: records_of(run_dir, f"step_{step}") for step in steps}


def assert_whole(run_dir: Path, steps: int) -> None:
    """Check that every submitted group that finished is complete in the records of exactly one step.

    No group is older than the staleness limit, and the version fields of each record are consistent.
    """
    seen: dict[tuple[int, int], int] = {}
    for step, of_step in records(run_dir).items():
        for record in of_step:
            key = record["group"], record["sample"]
            assert key not in seen, f"{key} is in step {seen[key]} and {step}"
            seen[key] = step
            spans, submitted = record["versions"], record["submitted_version"]
            assert [first for _, first, _ in spans] == [0, *(last for _, _, last in spans[:-1])]
            assert spans[-1][2] == record["tokens"]
            versions = [version for version, _, _ in spans]
            assert versions == sorted(set(versions))
            assert submitted <= versions[0] <= versions[-1] <= step - 1
            assert step - 1 - submitted <= HARD
    groups = {group for group, _ in seen}
    assert len(seen) == SAMPLES * len(groups)
    last = {record["group"] for record in records(run_dir)[steps]}
    assert not set(range(min(last))) - groups, "some groups are missing"
    rows = metrics(run_dir)
    assert sorted(step for step in rows if step) == list(range(1, steps + 1))
    assert all(rows[step]["staleness/max"] <= HARD for step in range(1, steps + 1))


def test_groups_run_ahead_though_an_engine_and_then_the_driver_die(task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with TrainProcess(task, run_dir, (*AHEAD, *ONE_RANK)) as run:
        run.wait_until(in_step(run, 2, "generating"))
        run.kill_one(ENGINE)
        run.wait_until(lambda: (run_dir / "checkpoints" / "step_4").exists())
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert "it starts again (1 of 3 times)" in run.text()
        assert not run.left_after(30)
    train(task, run_dir, *AHEAD, *ONE_RANK)
    assert restarts(run_dir) >= 1
    assert_whole(run_dir, 6)
    ages = [metrics(run_dir)[step]["staleness/mean"] for step in range(1, 7)]
    assert ages[0] == 0
    assert max(ages) > 0.5, "nothing ran ahead"
    assert not [path for path in (run_dir / "rollouts").iterdir() if path.name.startswith(".")]


@pytest.mark.on_demand  # tests/unit/runtime/test_engine_tasks.py restores responses into the journal
def test_engines_die_that_hold_responses_of_a_checkpoint(task: Path, tmp_path: Path) -> None:
    """The weights that sampled the responses no longer exist."""
    run_dir = tmp_path / "run"
    with TrainProcess(task, run_dir, (*AHEAD, *ONE_RANK)) as run:
        run.wait_until((run_dir / "checkpoints" / "step_4").exists)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert not run.left_after(30)
    saved = json.loads((run_dir / "checkpoints" / "step_4" / "rollouts" / "groups.json").read_text())
    assert [group for group in saved["groups"] if group["state"] == "finished" and group["version"] < 4]
    with TrainProcess(task, run_dir, (*AHEAD, *ONE_RANK)) as run:
        run.wait_until(lambda: "sending the initial weights to the engines" in run.text())
        run.wait_until(lambda: any(read_journal(path) for path in (run_dir / "journals").glob("*.0")))
        for engine in run.processes(ENGINE):
            engine.kill()
        assert run.finish() == 0, run.text()[-4000:]
        assert "step 5/6" not in run.text().partition("it starts again")[0]
    assert restarts(run_dir) == 2
    assert_whole(run_dir, 6)


@pytest.mark.on_demand  # test_groups_run_ahead also resumes
def test_one_step_off_is_the_same_run_after_a_death(task: Path, tmp_path: Path) -> None:
    """Every response has one weight version, and the order of training data does not depend on timing."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    train(task, whole, *ONE_STEP_OFF)
    for of_step in records(whole).values():
        assert all(len(record["versions"]) == 1 for record in of_step)
    with TrainProcess(task, run_dir, ONE_STEP_OFF) as run:
        run.wait_until(lambda: (run_dir / "checkpoints" / "step_2").exists())
        run.wait_until(in_step(run, 3, "updating"))
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert not run.left_after(30)
    train(task, run_dir, *ONE_STEP_OFF)
    assert without_queues(run_dir) == without_queues(whole)
    assert {step: row["staleness/mean"] for step, row in metrics(whole).items() if step > 1} == dict.fromkeys(
        range(2, 7), 1.0
    )
    assert_same_records(run_dir, whole)


@pytest.mark.on_demand
def test_a_replay_is_the_same_run_on_other_engines(task: Path, tmp_path: Path) -> None:
    """Engines hold one group at a time, so the trainer must wait for groups but never without one in flight."""
    first, again = tmp_path / "first", tmp_path / "again"
    given = (*AHEAD, "rollout.swap=recompute", "rollout.max_response_tokens=240", "rollout.max_concurrent_requests=4")
    train(task, first, *given)
    spans = [record["versions"] for of_step in records(first).values() for record in of_step]
    assert sum(len(of_response) > 1 for of_response in spans), "no weights changed under responses"
    one_engine = ("rollout.num_engines=1", "cluster.gpus_per_node=3", f"rollout.replay_schedule={first}")
    train(task, again, *given, *one_engine)
    assert records(again) == records(first)
    figures = [without_queues(run_dir, ("async/", "engine/", "weights/tensors_verified")) for run_dir in (again, first)]
    assert figures[0] == figures[1]


@pytest.mark.on_demand
def test_each_proximal_policy_on_tokens_of_several_versions(task: Path, tmp_path: Path) -> None:
    """With prox=metrics, which only reports the interpolation, the run is bitwise identical to prox=recomputed."""
    given = (*AHEAD, "rollout.swap=recompute", "rollout.max_response_tokens=240", "rollout.max_concurrent_requests=4")
    runs = {prox: tmp_path / prox for prox in ("recomputed", "metrics", "loglinear")}
    replayed = f"rollout.replay_schedule={runs['recomputed']}"
    for prox, more in (("recomputed", ()), ("metrics", (replayed,)), ("loglinear", ())):
        train(task, runs[prox], *given, f"algorithm.policy_loss.prox={prox}", *more)
        assert_whole(runs[prox], 6)
    names = ("async/", "engine/", "weights/tensors_verified", "actor/prox_")
    assert without_queues(runs["metrics"], names) == without_queues(runs["recomputed"], names)
    rows = {prox: metrics(run_dir) for prox, run_dir in runs.items()}
    assert all("actor/prox_error" not in rows[prox][1] for prox in ("recomputed", "loglinear"))
    # The proximal policy generated the first step's tokens.
    assert rows["metrics"][1]["actor/prox_error"] < 1e-5
    for of_prox in rows.values():
        assert of_prox[1]["actor/behave_weight"] == pytest.approx(1, abs=1e-5)
        assert sum(of_prox[step]["staleness/mixed_fraction"] for step in range(2, 7)) > 0
        assert max(abs(of_prox[step]["actor/behave_weight"] - 1) for step in range(2, 7)) > 1e-3
    assert all(rows["metrics"][step]["actor/prox_error"] > 1e-3 for step in range(2, 7))


def without_queues(run_dir: Path, queues: tuple[str, ...] = QUEUES) -> dict[int, dict[str, Any]]:
    rows = metrics(run_dir)
    return {step: {k: v for k, v in row.items() if not k.startswith(queues)} for step, row in rows.items()}


@pytest.mark.on_demand
@pytest.mark.parametrize(
    "given",
    [("rollout.swap=keep",), ("rollout.swap=recompute",), ("rollout.swap=recompute", "rollout.partial_tokens=6")],
    ids=["keep", "recompute", "parked"],
)
def test_a_drained_checkpoint_has_nothing_half_done(given: tuple[str, ...], task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(task, run_dir, *AHEAD, *given, "checkpoint.drain=true", "checkpoint.keep_last=9")
    for step in (2, 4):
        saved = json.loads((run_dir / "checkpoints" / f"step_{step}" / "rollouts" / "groups.json").read_text())
        assert saved["groups"]
        assert all(group["state"] != "running" for group in saved["groups"])
    assert_whole(run_dir, 6)


@pytest.mark.on_demand
def test_a_critic_a_reward_model_and_a_judge_work_ahead_too(task: Path, tmp_path: Path) -> None:
    run_dir, scorer = tmp_path / "run", write_scorer(task, "scorer", None)
    (tmp_path / "parser.py").write_text(PARSER)
    judge = (f"judge.parser={tmp_path / 'parser.py'}:last_digit", f"judge.hf_path={write_judge(tmp_path / 'judge')}")
    judge = (*(setting for setting in JUDGED if setting.startswith("judge.")), *judge)
    beside = (f"reward_model.hf_path={scorer}", f"reward_model.weight={SCORE_WEIGHT}", f"reward.weight={RULE_WEIGHT}")
    train(task, run_dir, *AHEAD, *PPO, *judge, *beside, "reward.overlong.enable=false")
    assert_whole(run_dir, 6)
    for of_step in records(run_dir).values():
        for record in of_step:
            expected = RULE_WEIGHT * digits_share(record["response"]) + SCORE_WEIGHT * record["scores"]["model"]
            assert record["reward"] == pytest.approx(expected + 0.25 * record["scores"]["judge"], abs=1e-5)
    rows = metrics(run_dir)
    assert all({"critic/loss", "reward/model"} <= rows[step].keys() for step in range(1, 7))
