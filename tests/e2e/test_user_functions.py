"""User functions of one run: reward, filter, loss, and advantage (per response and per token)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import TrainProcess, metrics, train

pytestmark = pytest.mark.slow

FUNCTIONS = """
import asyncio

import numpy as np
import torch

async def reward(data_source, solution_str, ground_truth, extra_info=None, *, bonus):
    await asyncio.sleep(0)
    if data_source == "held_out":
        raise LookupError("nothing is known of " + data_source)
    digits = sum(c.isdigit() for c in solution_str)
    found = {"score": digits + float(bonus), "acc": digits > 4, "digits": digits, "first": solution_str[:1]}
    return found if digits % 2 else found | {"even": 1}

def every_second(*, rewards, accuracies, group_ids, lengths, clipped):
    return np.arange(len(rewards)) % 2 == 0

def loss(logp, old_logp, advantages, mask, rollout_logp, *, margin):
    return -advantages * logp, {"margin": margin}

def in_groups(token_rewards, mask, group_ids, values, baseline_rewards, *, scale):
    rewards = token_rewards.sum(-1)
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    assert (sizes == 4).all()
    return scale * (rewards - (torch.zeros(len(sizes)).index_add(0, group, rewards) / sizes)[group])
"""
TOKENS = """
def by_tokens(token_rewards, mask, group_ids, **rest):
    assert group_ids is None
    return 7.0 * mask

by_tokens.per_response = False
"""


@pytest.fixture(scope="module")
def functions(task: Path) -> tuple[str, ...]:
    """Overrides with user functions and their keyword arguments."""
    path = task.parent / "mine.py"
    path.write_text(FUNCTIONS)
    (task.parent / "tokens.py").write_text(TOKENS)  # a separate file, which ranks load for the advantage only
    return (
        f"reward.function={path}:reward",
        "reward.kwargs.bonus=0.25",
        "reward.overlong.enable=false",
        f"algorithm.filter={path}:every_second",
        f"algorithm.policy_loss.name={path}:loss",
        "algorithm.policy_loss.kwargs.margin=0.125",
        "algorithm.policy_loss.clip_high=null",
        "algorithm.dynamic_sampling.enable=false",
        "weights.verify_every=0",
    )


@pytest.fixture(scope="module")
def user_run(task: Path, functions: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of one step with user functions."""
    run_dir = tmp_path_factory.mktemp("user") / "run"
    in_groups = (f"algorithm.advantage={task.parent / 'mine.py'}:in_groups", "algorithm.advantage_kwargs.scale=2")
    train(task, run_dir, *functions, *in_groups, "data.val=null", "trainer.steps=1")
    return run_dir


def test_functions_of_a_user_make_a_run(user_run: Path) -> None:
    run_dir = user_run
    first = metrics(run_dir)[1]
    records = [json.loads(line) for line in (run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert len(records) == 32
    for record in records:
        digits = sum(c.isdigit() for c in record["response"])
        assert (record["reward"], record["accuracy"]) == (digits + 0.25, float(digits > 4))
        assert (record["digits"], record["first"]) == (digits, record["response"][:1])
        assert record.get("even") == (None if digits % 2 else 1)
    assert first["reward/digits"] == pytest.approx(sum(record["digits"] for record in records) / 32)
    assert first["reward/even"] == 1  # mean over the responses with this part
    assert first["reward/errors"] == 0
    assert first["groups/untrained_responses"] == 0.5
    assert first["actor/margin"] == 0.125
    assert first["advantages/max"] == pytest.approx(2 * max(deviations(records)), rel=1e-5)


@pytest.mark.on_demand  # tests/unit covers the fraction of errors, tests/distributed per-token advantages
def test_a_function_that_fails_on_everything_ends_the_run(
    user_run: Path, task: Path, functions: tuple[str, ...], tmp_path: Path
) -> None:
    """The run resumes with a per-token advantage, which ranks load, and validation prompts that the reward rejects."""
    run_dir = tmp_path / "run"
    shutil.copytree(user_run, run_dir)
    (tmp_path / "val.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": "1", "data_source": "held_out"}) + "\n" for i in range(4))
    )
    by_tokens = (f"algorithm.advantage={task.parent / 'tokens.py'}:by_tokens", f"data.val={tmp_path / 'val.jsonl'}")
    more = ("trainer.steps=3", "trainer.validate_every_steps=0")
    with TrainProcess(task, run_dir, (*functions, *by_tokens, *more)) as run:
        assert run.finish() == 1, run.text()[-6000:]
        text = run.text()
    assert metrics(run_dir)[2]["advantages/abs_max"] == 7
    assert "failed on 4 of 4 responses of data.val after step 3, which reaches reward.max_error_fraction=1;" in text
    error = next(line for line in text.splitlines() if line.startswith("error:"))
    assert error.startswith(f"error: reward.function={task.parent / 'mine.py'}:reward failed")
    assert text.count("Traceback") == 1
    line = 1 + FUNCTIONS.splitlines().index('        raise LookupError("nothing is known of " + data_source)')
    assert f'mine.py", line {line}, in reward' in text


TOGETHER = """
def ranks(data_sources, solution_strs, ground_truths, extra_infos):
    order = sorted(solution_strs)
    return [{"score": order.index(text) / len(order), "of": len(order)} for text in solution_strs]
"""


@pytest.mark.on_demand  # tests/unit/rewards covers the collection over engines
def test_batch_function_sees_all_responses_of_a_step_of_all_engines(task: Path, tmp_path: Path) -> None:
    path = tmp_path / "ranks.py"
    path.write_text(TOGETHER)
    graded = ("reward.manager=batch", f"reward.function={path}:ranks", "reward.batch=step")
    graded = (*graded, "reward.overlong.enable=false", "algorithm.dynamic_sampling.enable=false")
    engines = ("rollout.num_engines=2", "cluster.gpus_per_node=2")
    train(task, tmp_path / "run", *graded, *engines, "trainer.steps=1", "trainer.validate_every_steps=1")
    for name, count in (("step_1", 32), ("val_step_1", 16)):
        records = read_records(tmp_path / "run" / "rollouts" / f"{name}.jsonl")
        order = sorted(record["response"] for record in records)
        assert len(order) == count
        for record in records:
            assert record["of"] == count
            assert record["reward"] == pytest.approx(order.index(record["response"]) / count)
    first = metrics(tmp_path / "run")[1]
    assert first["reward/of"] == 32
    assert first["reward/mean"] == pytest.approx(
        sum(record["reward"] for record in read_records(tmp_path / "run" / "rollouts" / "step_1.jsonl")) / 32
    )
    assert first["advantages/max"] > 0


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def deviations(records: list[dict[str, float]]) -> list[float]:
    """Return each reward minus the mean of its group."""
    groups: dict[float, list[float]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append(record["reward"])
    return [reward - sum(of_group) / len(of_group) for of_group in groups.values() for reward in of_group]
