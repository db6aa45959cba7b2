"""Concurrent calls of async functions, and graders that use too much memory: a failure affects its own sample only."""

from __future__ import annotations

import sys

import pytest

from mcore_rl.config.reward import RewardConfig
from tests.unit.rewards.managers import graded

FUNCTIONS = """
import asyncio, os, subprocess, sys, time

running, most, meeting = 0, 0, None

async def meet(solution_str, **_):
    '''Return when as many calls are running as the first response asks for.'''
    global running, most, meeting
    running += 1
    most = max(most, running)
    meeting = meeting or asyncio.Event()
    if running >= int(solution_str):
        meeting.set()
    await meeting.wait()
    running -= 1
    return {"score": 1.0, "most": most, "pid": os.getpid()}

async def grade(solution_str, **_):
    if solution_str == "wait":
        await asyncio.sleep(1000)
    if solution_str == "block":
        time.sleep(1000)
    if solution_str == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "die":
        os._exit(3)
    await asyncio.sleep(0.01)
    return {"score": float(solution_str), "pid": os.getpid()}

async def steady(solution_str, **_):
    if solution_str == "stubborn":
        return await grade(solution_str)
    await asyncio.sleep(0.1)
    return {"score": 1.0, "pid": os.getpid()}

def plain(**_):
    time.sleep(0.1)
    return {"score": 1.0, "pid": os.getpid()}

def eat(solution_str, **_):
    if solution_str == "child":
        subprocess.run([sys.executable, "-c", "x = bytearray(b'1') * 2**28; import time; time.sleep(1000)"])
    if solution_str == "eat":
        kept = bytearray(b"1") * 2**28
        time.sleep(1000)
    return float(solution_str)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other processes' memory")


def pids(scores):
    """Return the pids of the processes that graded the scores."""
    return {score.parts["pid"] for score in scores if score.error is None}


def test_max_concurrent_calls_is_reached_and_not_exceeded(functions):
    config = RewardConfig(function=f"{functions}:meet", max_concurrent_calls=6, timeout_seconds=60.0)
    scores = graded(config, ["6"] * 30)
    assert [score.error for score in scores] == [None] * 30
    assert max(score.parts["most"] for score in scores) == 6
    assert len({score.parts["pid"] for score in scores}) == 1


@pytest.mark.parametrize("more", [{"manager": "naive"}, {"max_concurrent_calls": 1}])
def test_naive_manager_and_limit_of_one_run_one_call_at_a_time(functions, more):
    config = RewardConfig(function=f"{functions}:meet", timeout_seconds=60.0, **more)
    assert {score.parts["most"] for score in graded(config, ["1"] * 10)} == {1}


def test_time_limit_applies_to_each_call(functions):
    config = RewardConfig(function=f"{functions}:grade", max_concurrent_calls=8, timeout_seconds=1.0)
    texts = ["wait" if number % 5 == 0 else str(number) for number in range(40)]
    scores = graded(config, texts)
    assert len(pids(scores)) == 1  # no failed call ended the process
    for text, score in zip(texts, scores, strict=True):
        if text == "wait":
            assert score.error == "the grader did not finish within reward.timeout_seconds=1"
            assert "in grade\n    await asyncio.sleep(1000)" in score.traceback
        else:
            assert (score.reward, score.error) == (float(text), None)


def test_calls_that_fail_among_concurrent_ones_fail_alone(functions):
    failures = {
        "block": "did not finish within reward.timeout_seconds=1",
        "stubborn": "did not finish within reward.timeout_seconds=1",
        "exit": "SystemExit: 3",
        "die": "exit code 3",
        "words": "ValueError: could not convert",
    }
    config = RewardConfig(function=f"{functions}:grade", max_concurrent_calls=4, timeout_seconds=1.0)
    texts = [text for failing in failures for text in (*map(str, range(5)), failing, *map(str, range(6)))]
    for text, score in zip(texts, graded(config, texts), strict=True):
        if text in failures:
            assert failures[text] in score.error
            assert score.reward == 0.0
        else:
            assert (score.reward, score.error) == (float(text), None)


def test_answers_of_other_calls_do_not_extend_the_time_limit(functions):
    config = RewardConfig(function=f"{functions}:steady", max_concurrent_calls=2, timeout_seconds=1.0)
    scores = graded(config, ["stubborn", *["1"] * 25])  # the other calls take 2.5 seconds, one after another
    assert [number for number, score in enumerate(scores) if score.error is not None] == [0]
    assert len(pids(scores)) > 1


def test_time_limit_applies_to_each_response_of_a_batch(functions):
    scores = graded(RewardConfig(function=f"{functions}:plain", timeout_seconds=1.5), ["1"] * 30)
    assert len(pids(scores)) == 1
    assert [score.reward for score in scores] == [1.0] * 30


@linux
@pytest.mark.parametrize("text", ["eat", "child"])
def test_grader_above_memory_mib_fails_its_own_sample_only(functions, text):
    config = RewardConfig(function=f"{functions}:eat", memory_mib=250, timeout_seconds=60.0)
    scores = graded(config, ["1", "2", text, "3", "4"])
    assert scores[2].error == "the grader used more memory than reward.memory_mib=250"
    assert [score.reward for score in scores] == [1, 2, 0, 3, 4]
    assert [score.error for score in scores if score is not scores[2]] == [None] * 4
