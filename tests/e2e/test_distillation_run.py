"""Runs with a teacher: a policy that equals its teacher stays as it is, and another one approaches it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import ALPHABET, ONE_RANK, metrics, train
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


def test_policy_approaches_a_teacher_of_another_family_without_rewards(task: Path, other: Path) -> None:
    run = task.parent / "distilled"
    train(task, run, *KEYS, f"teacher.hf_path={other}", "algorithm.old_logp=rollout")
    rows = metrics(run)
    assert rows[1]["distillation/kl_loss"] > 0.05
    assert rows[6]["distillation/kl_loss"] < 0.7 * rows[1]["distillation/kl_loss"]
    # The mean over sampled tokens estimates the same quantity.
    assert rows[1]["distillation/kl"] == pytest.approx(rows[1]["distillation/kl_loss"], rel=0.5)
    assert all(row["reward/mean"] == 0 for step, row in rows.items() if step)
