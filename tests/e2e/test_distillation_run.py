"""Runs with a teacher: a policy that equals its teacher stays as it is, another one approaches it, and a policy
learns from its own average after hints."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ALPHABET, ONE_RANK, TrainProcess, metrics, train
from tests.e2e.test_failures import assert_died
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

KEYS = (
    *("reward.function=none", "reward.overlong.enable=false", "algorithm.dynamic_sampling.enable=false"),
    *("data.val=null", "teacher.alone=true", "teacher.in_advantage=1", "teacher.in_loss=0.5"),
    *(
        "actor.optimizer.warmup_steps=0",
        "actor.optimizer.lr=2e-3",
        "checkpoint.every_steps=0",
        "trainer.validate_every_steps=0",
        "trainer.steps=6",
    ),
)


@pytest.fixture(scope="module")
def other(task: Path) -> Path:
    """A dense teacher with the tokenizer of the task's policy, which has experts."""
    sizes = {"vocab_size": len(ALPHABET) + 3, "head_dim": 32, "eos_token_id": 1, "hidden_size": 48}
    directory = write_tiny_model(task.parent / "teacher", "qwen3", std=0.06, seed=5, **sizes)
    for file in (task.parent / "model").glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


def test_teacher_on_engines_equal_to_the_policy_gives_no_signal(task: Path) -> None:
    run = task.parent / "same"
    keys = (*KEYS, *ONE_RANK, f"teacher.hf_path={task.parent / 'model'}", "trainer.steps=1")
    engines = ("teacher.num_engines=1", "teacher.top_k=4", "teacher.kv_cache_gib=0.03", "rollout.temperature=1")
    train(task, run, *keys, *engines, "trainer.prompts_per_update=8")
    row = metrics(run)[1]
    # The same weights twice in float32: log-probabilities differ in the last digits.
    assert abs(row["distillation/kl"]) < 1e-5
    assert abs(row["distillation/kl_loss"]) < 1e-5
    assert row["actor/grad_norm"] < 1e-4


@pytest.mark.on_demand  # tests/distributed/test_teacher.py
def test_policy_approaches_a_teacher_of_another_family_without_rewards(task: Path, other: Path) -> None:
    run = task.parent / "distilled"
    train(task, run, *KEYS, f"teacher.hf_path={other}", "algorithm.old_logp=rollout")
    rows = metrics(run)
    assert rows[1]["distillation/kl_loss"] > 0.05
    assert rows[6]["distillation/kl_loss"] < 0.7 * rows[1]["distillation/kl_loss"]
    # The mean over sampled tokens estimates the same quantity.
    assert rows[1]["distillation/kl"] == pytest.approx(rows[1]["distillation/kl_loss"], rel=0.5)
    assert all(row["reward/mean"] == 0 for step, row in rows.items() if step)


@pytest.mark.on_demand  # tests/distributed/test_self_distillation.py
def test_policy_learns_from_its_own_average_after_hints(task: Path) -> None:
    run = task.parent / "own"
    hints = ("data.hint_key=answer", "data.hint_template='{hint}{hint}{prompt}'", "data.max_hinted_tokens=18")
    # The last value of a key counts.
    train(
        task, run, *KEYS, *ONE_RANK, "teacher.moving_average=0.5", *hints, "trainer.steps=2", "checkpoint.every_steps=2"
    )
    rows = metrics(run)
    assert rows[1]["distillation/hinted_fraction"] == 1
    # The average is the policy in the first step: only the hint differs.
    assert rows[1]["distillation/kl_loss"] > 1e-3
    assert any("average.0." in path.read_text() for path in run.glob("checkpoints/step_2/*.json"))


@pytest.mark.on_demand
def test_teacher_ranks_distil_resume_and_end_the_run_if_one_dies(task: Path, other: Path) -> None:
    """The teacher has tensor-parallel ranks of its own, and the policy expert-parallel ones."""
    run = task.parent / "ranks"
    keys = (*KEYS, f"teacher.hf_path={other}", "teacher.top_k=4", "rollout.temperature=0.9", "checkpoint.every_steps=1")
    ranks = ("teacher.num_ranks=2", "teacher.parallel.tp=2", "teacher.tokens_per_microbatch=256")
    train(task, run, *keys, *ranks, "trainer.steps=2")
    assert metrics(run)[1]["distillation/kl_loss"] > 0.01
    with TrainProcess(task, run, (*keys, *ranks, "trainer.steps=99")) as resumed:
        resumed.wait_until(lambda: max(metrics(run)) >= 3)
        resumed.kill_one("ray::TeacherRankProcess")
        assert_died(resumed, "teacher rank", time.monotonic())
    rows = metrics(run)
    assert rows[3]["distillation/kl_loss"] < rows[1]["distillation/kl_loss"]
