"""Grading processes: order of scores; graders that raise, hang or die; cleanup."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.reward import RewardConfig
from mcore_rl.errors import ConfigError, WorkerDiedError
from mcore_rl.ports import Rewarder
from mcore_rl.rewards.manager import RewardManager
from tests.unit.rewards.managers import grade_with, graded, prompt, running_manager

ROOT = Path(__file__).parents[3]
FUNCTIONS = """
import collections, ctypes, itertools, os, subprocess, sys, time

def hang_in_c():
    collections.deque(itertools.repeat(0), maxlen=0)  # never handles signals

def swallow():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass

def note(pid):
    path = os.environ.get("CHILD_PID_FILE")
    if path:
        open(path, "w").write(str(pid))

def fork_and_die():
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    note(child)
    os._exit(5)

def spawn_and_hang():
    note(subprocess.Popen(["sleep", "1000"]).pid)
    hang_in_c()

ACTIONS = {
    "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit(0),
    "loop": lambda: exec("while True: pass"),
    "sleep": lambda: time.sleep(1000),
    "swallow": swallow,
    "hang": hang_in_c,
    "die0": lambda: os._exit(0),
    "die3": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "fork": fork_and_die,
    "spawn": spawn_and_hang,
    "none": lambda: None,
    "pid": lambda: os.getpid(),
}

def grade(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str in ACTIONS:
        return ACTIONS[solution_str]()
    return float(solution_str)

"""
EXPECTED = {
    "raise": "ZeroDivisionError: division by zero",
    "exit": "SystemExit",
    "loop": "did not finish within reward.timeout_seconds=0.6",
    "sleep": "did not finish within reward.timeout_seconds=0.6",
    "swallow": "could not be interrupted",
    "hang": "could not be interrupted",
    "die0": "exit code 0",
    "die3": "exit code 3",
    "segfault": "SIGSEGV",
    "fork": "exit code 5",
    "none": "None instead of a finite number",
}


@pytest.fixture(scope="module")
def graders(functions):
    return f"{functions}:grade"


def workers():
    """Return the pids of this process's grading processes."""
    children = psutil.Process().children()
    return {child.pid for child in children if "mcore_rl.rewards.processes.worker" in child.cmdline()}


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def manager(graders):
    with running_manager(RewardConfig(function=graders, workers=2)) as manager:
        yield manager


def test_collect_returns_the_requested_keys_only(manager):
    rewarder: Rewarder = manager
    assert rewarder.collect([]) == {}
    for call in range(2):
        keys = range(call * 1000, call * 1000 + 100)
        for key in keys:
            manager.submit(key, prompt(), str(key), 1)
        scores = manager.collect(keys)
        assert {key: score.reward for key, score in scores.items()} == {key: float(key) for key in keys}


def test_collect_from_several_threads_returns_each_its_own_scores(manager):
    for key in range(50):
        manager.submit(key, prompt(), str(key), 1)
    with ThreadPoolExecutor(2) as pool:
        odd, even = pool.map(manager.collect, (range(1, 50, 2), range(2, 50, 2)))
    rest = manager.collect([0])
    for scores, keys in ((odd, range(1, 50, 2)), (even, range(2, 50, 2)), (rest, [0])):
        assert {key: score.reward for key, score in scores.items()} == {key: float(key) for key in keys}


@pytest.mark.slow
def test_grader_that_raises_hangs_or_dies_fails_its_own_sample_only(graders):
    config = RewardConfig(function=graders, timeout_seconds=0.6, workers=2)
    texts = [text for name in EXPECTED for text in (name, *map(str, range(8)))]
    for text, score in zip(texts, graded(config, texts), strict=True):
        if text in EXPECTED:
            assert EXPECTED[text] in score.error
            assert (score.reward, score.accuracy) == (0.0, 0.0)
        else:
            assert (score.reward, score.error) == (float(text), None)


def test_first_failure_of_a_batch_has_a_traceback(manager):
    scores = grade_with(manager, ["1", "raise"] * 10)
    shown = [score.traceback for score in scores if score.traceback]
    assert 1 <= len(shown) < 10  # ten samples failed
    lines = shown[0].splitlines()
    assert lines[0].startswith("Traceback")
    assert "mine.py" in lines[1]  # no frames of this project before it
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_death_on_the_last_sample_of_a_batch_fails_this_sample(manager):
    manager.submit(1, prompt(), "die3", 1)
    assert "exit code 3" in manager.collect([1])[1].error
    manager.submit(1, prompt(), "4", 1)
    assert manager.collect([1])[1].reward == 4.0


def test_function_receives_the_response_and_all_fields_of_its_prompt(tmp_path):
    """The signature is that of verl's documentation."""
    path = tmp_path / "my_reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1.0, 'given': [data_source, solution_str, ground_truth, extra_info['index']]}\n"
    )
    with running_manager(RewardConfig(function=f"{path}:compute_score")) as manager:
        for key in range(2):
            manager.submit(key, prompt("72", index=key), f"so {key}", 1)
        scores = manager.collect(range(2))
    assert [scores[key].parts["given"] for key in range(2)] == [
        f"['test', 'so {key}', '72', {key}]" for key in range(2)
    ]


def test_death_of_a_grader_kills_the_processes_it_forked(graders, tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD_PID_FILE", str(tmp_path / "pid"))
    with running_manager(RewardConfig(function=graders)) as manager:
        manager.submit(1, prompt(), "fork", 1)
        assert "exit code 5" in manager.collect([1])[1].error
        child = int((tmp_path / "pid").read_text())
        assert wait_until(lambda: not alive(child), 5)


def test_unpicklable_sample_fails_itself_only(manager):
    manager.submit(0, prompt(handle=lambda: None), "1", 1)
    manager.submit(1, prompt(), "1", 1)
    scores = manager.collect([0, 1])
    assert "cannot be sent" in scores[0].error
    assert scores[1].error is None


def test_submitting_a_key_twice_raises(manager):
    manager.submit(0, prompt(), "1", 1)
    with pytest.raises(ValueError, match="key 0"):
        manager.submit(0, prompt(), "1", 1)
    manager.collect([0])


def test_function_that_does_not_load_raises_config_error(tmp_path):
    with running_manager(RewardConfig(function=f"{tmp_path}/none.py:f")) as manager:
        with pytest.raises(ConfigError, match="there is no file"):
            manager.wait_ready()
        with pytest.raises(ConfigError, match="there is no file"):
            manager.collect([0])


def test_processes_that_cannot_start_raise_worker_died_error(tmp_path):
    before, path = workers(), tmp_path / "fatal.py"
    path.write_text("import os\nos._exit(7)\n")
    with (
        running_manager(RewardConfig(function=f"{path}:f")) as manager,
        pytest.raises(WorkerDiedError, match="exit code 7"),
    ):
        manager.wait_ready()
    assert workers() == before


def test_shutdown_while_a_grader_hangs_leaves_no_process(graders, tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD_PID_FILE", str(tmp_path / "pid"))
    before = workers()
    manager = RewardManager(RewardConfig(function=graders, workers=2), max_response_tokens=10)
    manager.submit(0, prompt(), "spawn", 1)
    assert wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = int((tmp_path / "pid").read_text())
    assert len(workers() - before) == 2
    assert alive(child)
    manager.shutdown()
    manager.shutdown()
    assert workers() == before
    assert wait_until(lambda: not alive(child), 5)
    with pytest.raises(RuntimeError, match="shut down"):
        manager.submit(1, prompt(), "1", 1)


def test_parent_that_exits_without_shutdown_leaves_no_worker(graders):
    script = (
        "from mcore_rl.config.schema import RewardConfig\n"
        "from mcore_rl.rewards.manager import RewardManager\n"
        "from mcore_rl.types import Prompt\n"
        f"m = RewardManager(RewardConfig(function={graders!r}), max_response_tokens=1)\n"
        "m.submit(0, Prompt(0, None, 'q', 'test', '0'), 'pid', 1)\n"
        "print(int(m.collect([0])[0].reward))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert wait_until(lambda: not alive(int(ended.stdout)))
