"""Engine loop: nothing waits for a batch, and calls run between two steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.errors import DataError, PeerLostError, WeightSyncError, WorkerDiedError
from mcore_rl.rollout.ended_requests import EndedRequests
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from tests.unit.rollout.fake_engine import VOCABULARY, FakeEngine

SECONDS = 20.0


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop(FakeEngine())
    thread = threading.Thread(target=loop.serve, daemon=True)
    thread.start()
    yield loop
    loop.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()


def fake(loop: EngineLoop) -> FakeEngine:
    assert isinstance(loop.engine, FakeEngine)
    return loop.engine


def requests_of(name: str, lengths: list[int]) -> list[GenerationRequest]:
    ids = np.array([3, 4], np.int32)
    return [GenerationRequest(f"{name}.{i}", ids, 1, SamplingOptions(length)) for i, length in enumerate(lengths)]


class Held:
    """Engine whose steps are blocked until released, and then take some time."""

    def __init__(self, engine: FakeEngine) -> None:
        self.in_pass, self.go = threading.Event(), threading.Event()
        engine.before_pass = self._wait

    def _wait(self) -> None:
        self.in_pass.set()
        assert self.go.wait(SECONDS)
        time.sleep(0.005)


def test_loop_generate_calls_back_on_the_callers_thread(loop: EngineLoop) -> None:
    ended: list[tuple[str, str]] = []
    loop.generate(
        requests_of("a", [5, 2, 9, 2]), lambda done: ended.append((done.request_id, threading.current_thread().name))
    )
    assert ended == [(name, threading.current_thread().name) for name in ("a.1", "a.3", "a.0", "a.2")]


def test_loop_calls_and_short_requests_run_beside_a_long_one(loop: EngineLoop) -> None:
    engine, held = fake(loop), Held(fake(loop))
    found: list[Completion] = []
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(loop.generate, requests_of("long", [48]), found.append)
        assert held.in_pass.wait(SECONDS)
        asked = pool.submit(loop.between_steps, lambda: (engine.num_passes, engine.num_running))
        short = pool.submit(loop.generate, requests_of("short", [1]), found.append)
        assert not asked.done()
        held.go.set()
        passes, running = asked.result(SECONDS)
        for each in (short, long):
            each.result(SECONDS)
    assert running > 0
    assert 0 < passes < engine.num_passes == 48
    assert [done.request_id for done in found] == ["short.0", "long.0"]
    assert found[1].token_ids.tolist() == list(range(1, 49))


def test_loop_aborted_response_can_be_continued(loop: EngineLoop) -> None:
    engine, held = fake(loop), Held(fake(loop))
    heard: list[Completion | BaseException] = []
    (request,) = requests_of("a", [40])
    loop.submit([request], heard.append)
    assert held.in_pass.wait(SECONDS)
    with ThreadPoolExecutor(1) as pool:
        aborting = pool.submit(loop.abort, ["a.0"])
        held.go.set()
        (partial,) = aborting.result(SECONDS)
    assert (partial.finish_reason, heard, engine.num_running) == ("abort", [], 0)
    assert 0 < len(partial.token_ids) < 40
    done: list[Completion] = []
    loop.generate([replace(request, partial=partial)], done.append)
    assert done[0].token_ids.tolist() == [i % VOCABULARY for i in range(1, 41)]
    assert len(done[0].logp) == len(done[0].versions) == 40


def test_loop_failing_step_reaches_all_listeners(loop: EngineLoop) -> None:
    engine, held = fake(loop), Held(fake(loop))

    def fail() -> None:
        held._wait()
        raise WeightSyncError("half an update")

    engine.before_pass = fail
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(loop.generate, requests_of(name, [3]), lambda done: None) for name in "ab"]
        assert held.in_pass.wait(SECONDS)
        held.go.set()
        for call in calls:
            with pytest.raises(WeightSyncError, match="half an update"):
                call.result(SECONDS)
    engine.before_pass = lambda: None
    loop.generate(requests_of("a", [3]), lambda done: None)
    assert engine.num_running == 0


def test_loop_after_failed_update_keeps_requests_until_a_complete_one(loop: EngineLoop) -> None:
    """An update also fails on the engines that remain when another engine dies in it."""
    engine, ended = fake(loop), queue.SimpleQueue[Completion | BaseException]()
    held = Held(engine)
    loop.submit_nowait(requests_of("running", [5]), ended.put)
    assert held.in_pass.wait(SECONDS)

    def fail() -> None:
        engine.weights_complete = False
        raise PeerLostError("another engine died")

    def update() -> None:
        engine.weight_version, engine.weights_complete = 1, True

    failed = loop._post(fail)
    held.go.set()
    with pytest.raises(PeerLostError):
        failed.result(SECONDS)
    loop.submit(requests_of("new", [2]), ended.put)
    assert loop.between_steps(lambda: (engine.num_passes, engine.num_running)) == (1, 2)
    loop.between_steps(update)
    found = [ended.get(timeout=SECONDS) for _ in range(2)]
    assert {done.request_id: done.versions.tolist() for done in found if isinstance(done, Completion)} == {
        "new.0": [1, 1],
        "running.0": [0, 1, 1, 1, 1],
    }


@pytest.mark.parametrize("where", ["in a pass", "between two"])
def test_loop_dead_engine_ends_the_loop(where: str) -> None:
    loop = EngineLoop(FakeEngine())

    def fail() -> None:
        raise WorkerDiedError("rank 1 is gone")

    fake(loop).before_pass = fail if where == "in a pass" else lambda: time.sleep(0.005)
    with ThreadPoolExecutor(2) as pool:
        serving = pool.submit(loop.serve)
        generating = pool.submit(loop.generate, requests_of("a", [40]), lambda done: None)
        if where == "between two":
            with pytest.raises(WorkerDiedError, match="rank 1 is gone"):
                loop.between_steps(fail)
        for call in (generating, serving):
            with pytest.raises((WorkerDiedError, RuntimeError)) as raised:
                call.result(SECONDS)
            assert call is generating or isinstance(raised.value, WorkerDiedError)
    with pytest.raises(RuntimeError, match="has ended"):
        loop.between_steps(lambda: None)
    ended = list[Completion | BaseException]()
    loop.submit_nowait(requests_of("b", [3]), ended.append)
    assert [type(error) for error in ended] == [WorkerDiedError], "the gateway gives the request to another engine"


def test_loop_seconds_stuck_excludes_idle_time(loop: EngineLoop) -> None:
    held = Held(fake(loop))
    time.sleep(0.05)
    assert (loop.seconds_stuck, loop.busy_seconds) == (0.0, 0.0)
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(loop.generate, requests_of("a", [2]), lambda done: None)
        assert held.in_pass.wait(SECONDS)
        time.sleep(0.05)
        assert loop.seconds_stuck >= 0.05
        held.go.set()
        generating.result(SECONDS)
    assert loop.between_steps(lambda: loop.busy_seconds) >= 0.05


def test_loop_generate_callback_error_aborts_own_requests(loop: EngineLoop) -> None:
    def fail(done: Completion) -> None:
        raise LookupError(done.request_id)

    other: list[Completion] = []
    fake(loop).before_pass = lambda: time.sleep(0.005)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(loop.generate, requests_of("b", [30]), other.append)
        with pytest.raises(LookupError, match=r"a\.0"):
            loop.generate(requests_of("a", [1, 45]), fail)
        beside.result(SECONDS)
    assert len(other) == 1
    assert loop.between_steps(lambda: loop.engine.num_running) == 0
    assert len(fake(loop).cancelled) == 1


def test_loop_rejected_request_raises_in_the_caller(loop: EngineLoop) -> None:
    (request,) = requests_of("a", [3])
    with pytest.raises(DataError, match="max_prompt_tokens"):
        loop.generate([replace(request, token_ids=np.zeros(94, np.int32))], lambda done: None)
    loop.generate([request], lambda done: None)


def test_loop_withdraw_takes_unstarted_requests_only(loop: EngineLoop) -> None:
    """Two of four requests run; of the other two, one is withdrawn."""
    engine = fake(loop)
    engine.slots = 2
    held = Held(engine)
    begun: list[str] = []
    ended: list[tuple[str, str, int]] = []
    seen: list[list[str]] = []

    def choose(unbegun: Collection[str]) -> list[str]:
        seen.append(sorted(unbegun))
        return ["a.3"] if "a.3" in unbegun else []

    def finish(done: Completion) -> None:
        ended.append((done.request_id, done.finish_reason, len(done.token_ids)))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loop.generate, requests_of("a", [5, 5, 5, 5]), finish, lambda: begun.append("one"))
        assert held.in_pass.wait(SECONDS)
        withdrawing = threading.Thread(target=loop.withdraw, args=(choose,))
        withdrawing.start()
        held.go.set()
        withdrawing.join(SECONDS)
        waiting.result(SECONDS)
    assert seen == [["a.2", "a.3"]]
    assert sorted(ended) == [("a.0", "length", 5), ("a.1", "length", 5), ("a.2", "length", 5), ("a.3", "abort", 0)]
    assert len(begun) == 3
    loop.withdraw(choose)
    assert seen[1:] == [[]]


def test_ended_requests_wake_their_thread_once_per_step() -> None:
    ended = EndedRequests()
    results = [ValueError(str(number)) for number in range(4)]
    for result in results[:3]:
        ended.add(result)
    assert ended._wakes.qsize() == 1
    assert [*ended.take()] == results[:3]
    ended.add(results[3])
    assert [*ended.take()] == results[3:]


def test_ended_requests_lose_no_result_that_arrives_during_a_take() -> None:
    ended, count = EndedRequests(), 20_000
    results = [ValueError() for _ in range(count)]
    taken: list[Completion | BaseException] = []

    def take() -> None:
        while len(taken) < count:
            taken.extend(ended.take())

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    for result in results:
        ended.add(result)
    thread.join(SECONDS)
    assert taken == results
