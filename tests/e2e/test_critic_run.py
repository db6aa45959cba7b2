"""PPO with a reference model and a critic, which has its own ranks and layout, trains with the policy, and resumes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.runs import TrainProcess, metrics, train
from tests.e2e.test_failures import SECONDS_TO_END, assert_resumes_to_the_same, in_step

pytestmark = pytest.mark.slow

# The policy has two data-parallel ranks (experts over both), the critic one rank.
PPO = (
    "algorithm.advantage=gae",
    "algorithm.lam=0.95",
    "algorithm.kl.in_loss=0.01",
    "algorithm.kl.in_reward=0.05",
    "algorithm.kl.controller=adaptive",
    "algorithm.kl.target=0.01",
    "algorithm.kl.horizon=100",
    "critic.num_ranks=1",
    "critic.optimizer.lr=1e-3",
    "trainer.critic_warmup_steps=1",
)


@pytest.fixture(scope="module")
def whole_ppo_run(task: Path) -> Path:
    directory = task.parent / "ppo"
    train(task, directory, *PPO)
    return directory


def test_every_step_has_the_critics_figures(whole_ppo_run: Path) -> None:
    rows = metrics(whole_ppo_run)
    for step in range(1, 5):
        row = rows[step]
        assert {"critic/loss", "critic/explained_variance", "critic/grad_norm", "returns/mean"} <= row.keys()
        # Advantages are whitened over all tokens of the step.
        assert abs(row["advantages/mean"]) < 1e-5
        assert row["advantages/abs_max"] > 0.5
    assert rows[4]["critic/trained_tokens"] == rows[4]["actor/trained_tokens"]
    # The policy differs from the reference after its first update, in step 2, and the coefficient adapts.
    assert rows[1]["reward/kl"] == rows[2]["reward/kl"] == 0
    assert rows[4]["reward/kl"] != 0
    assert rows[4]["actor/kl_reference"] > 0
    assert rows[2]["reward/kl_coefficient"] < rows[1]["reward/kl_coefficient"] == 0.05


def test_the_policy_waits_for_its_critic(whole_ppo_run: Path) -> None:
    rows = metrics(whole_ppo_run)
    assert "actor/loss" not in rows[1]
    assert all("actor/loss" in rows[step] for step in (2, 3, 4))


@pytest.mark.on_demand  # test_failures also kills processes of a run, and tests/distributed resumes a critic
def test_a_killed_critic_ends_the_run_by_name_and_both_models_resume(
    task: Path, whole_ppo_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with TrainProcess(task, run_dir, PPO) as run:
        run.wait_until(in_step(run, 3, "generating"))
        run.kill_one("ray::CriticProcess")
        killed = time.monotonic()
        assert run.finish(SECONDS_TO_END) == 1, run.text()[-4000:]
        error = next(line for line in run.text().splitlines() if line.startswith("error:"))
        assert "critic rank 0" in error, error
        assert not run.left_after(SECONDS_TO_END - (time.monotonic() - killed))
    assert_resumes_to_the_same(task, run_dir, whole_ppo_run, *PPO)
