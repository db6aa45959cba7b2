"""Processes that a reward function starts can import its file and other files in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.reward import RewardConfig
from tests.unit.rewards.managers import graded

SPAWNS = """
from __future__ import annotations  # dataclasses then look the module up

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import beside_spawning

@dataclass
class Verdict:
    score: float

def work(text):
    return Verdict(beside_spawning.length(text))

def f(solution_str, **_):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("{method}")) as pool:
        return pool.submit(work, solution_str).result().score
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_spawned_by_a_reward_function_find_its_module(tmp_path: Path, method: str) -> None:
    (tmp_path / "beside_spawning.py").write_text("def length(text): return float(len(text))\n")
    (tmp_path / f"mine_{method}.py").write_text(SPAWNS.format(method=method))
    config = RewardConfig(function=f"{tmp_path}/mine_{method}.py:f", workers=1, timeout_seconds=120.0)
    (score,) = graded(config, ["four"])
    assert (score.error, score.reward) == (None, 4.0)
