"""A killed critic ends the run; the policy and the critic resume to the same metrics."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.runs import SECONDS_TO_END, TrainProcess, in_step, train
from tests.e2e.test_failures import assert_resumes_to_the_same

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
