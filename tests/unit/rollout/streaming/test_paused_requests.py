"""Responses that reach their token limit for one version pause until the next version without losing tokens."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.engines.step_output import StepOutput
from mcore_rl.errors import WeightSyncError, WorkerDiedError
from mcore_rl.rollout.journal import TokenJournal, read_journal
from mcore_rl.rollout.loop import ENDED, STEPS_PER_CALL, EngineLoop
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from tests.unit.rollout.fake_engine import VOCABULARY, FakeEngine

SECONDS = 20.0
Heard = queue.SimpleQueue[Completion | BaseException]


def token(seed: int, index: int, version: int) -> int:
    """Return the token of a response at this position with these weights; never the end token."""
    return 1 + (7 * seed + 3 * index + 11 * version) % (VOCABULARY - 1)


class VersionedEngine(FakeEngine):
    """Engine whose tokens depend on the version. `ran` records the requests and version of each step; weights change
    after the steps in `swaps`."""

    def __init__(self, slots: int = 4, swaps: Sequence[int] = ()) -> None:
        super().__init__(slots)
        self.swaps, self.ran = swaps, list[tuple[int, list[str]]]()
        self.limits: list[int] = []
        self.loop: EngineLoop

    def _run_step(self, limit: int) -> list[StepOutput]:
        self.limits.append(limit)
        outputs, entries = super()._run_step(limit), list(self._running.values())[: self.slots]
        self.ran.append((self.weight_version, [entry.request.request_id for entry in entries]))
        found = []
        for output, entry in zip(outputs, entries, strict=True):
            drawn = token(entry.request.seed, len(entry.token_ids), self.weight_version)
            last = len(entry.token_ids) + 1 == entry.request.sampling.max_response_tokens
            found.append(StepOutput(output.engine_id, [drawn], [-float(drawn)], "length" if last else None))
        if self.num_passes in self.swaps:
            self.loop._post(self.swap)
        return found

    def swap(self) -> None:
        self.weight_version += 1


def serve(engine: VersionedEngine, journal: TokenJournal | None = None) -> EngineLoop:
    engine.loop = EngineLoop(engine, journal)
    start(engine.loop)
    return engine.loop


def start(loop: EngineLoop) -> None:
    threading.Thread(target=_serve, args=(loop,), daemon=True).start()


def _serve(loop: EngineLoop) -> None:
    with contextlib.suppress(WorkerDiedError):  # waiting callers receive the error
        loop.serve()


def request(name: str, length: int, limit: int | None = None, seed: int = 1) -> GenerationRequest:
    ids = np.array([3, 4], np.int32)
    return GenerationRequest(name, ids, seed, SamplingOptions(length), tokens_per_version=limit)


def completed(heard: Heard, count: int = 1) -> dict[str, Completion]:
    found = {}
    for _ in range(count):
        completion = heard.get(timeout=SECONDS)
        assert isinstance(completion, Completion), completion
        found[completion.request_id] = completion
    return found


def assert_right(completion: Completion, asked: GenerationRequest) -> None:
    assert completion.finish_reason == "length"
    expected = [token(asked.seed, index, int(version)) for index, version in enumerate(completion.versions)]
    assert completion.token_ids.tolist() == expected
    assert completion.logp.tolist() == [-float(drawn) for drawn in expected]
    assert len(expected) == asked.sampling.max_response_tokens


def test_loop_token_limit_per_version_pauses_a_response() -> None:
    engine, heard, begun = VersionedEngine(slots=2, swaps=(3, 20)), Heard(), list[int]()
    asked = [request("long", 14, 5), request("other", 60), request("third", 6)]
    serve(engine).submit(asked, heard.put, lambda: begun.append(1))
    found = completed(heard, 3)
    engine.loop.stop()
    # New weights reset the limit; the last token is sampled when it is alone.
    assert found["long"].versions.tolist() == [0] * 3 + [1] * 5 + [2] * 6
    for each in asked:
        assert_right(found[each.request_id], each)
    assert engine.ran[7:9] == [(1, ["long", "other"]), (1, ["other", "third"])], "its place is another's"
    assert sum(len(names) for _, names in engine.ran) == 80, "nothing is drawn twice"
    assert engine.loop.tokens_carried_over == 8 + 13
    assert begun == [1] * 3


class LateEngine(VersionedEngine):
    """Engine with a pass in flight when weights change: the next step returns its results."""

    def swap(self) -> None:
        self._hold(self._run_step(1))
        super().swap()


def test_loop_results_in_flight_at_an_update_keep_their_version() -> None:
    """They do not count towards the limit of the new version, and those of aborted requests are dropped."""
    engine, heard = LateEngine(slots=3, swaps=(3,)), Heard()
    asked = [request("long", 12, 5), request("ending", 4, seed=2), request("aborted", 20, seed=3)]
    serve(engine)
    engine.loop.submit_nowait(asked, heard.put)
    engine.loop.submit_nowait([request("other", 40)], Heard().put)
    before = engine.swap

    def swap_and_abort() -> None:
        before()
        (partial,) = engine.abort(["aborted"])
        assert partial.versions.tolist() == [0] * 3

    engine.swap = swap_and_abort  # type: ignore[method-assign]
    found = completed(heard, 2)
    engine.loop.stop()
    assert found["ending"].versions.tolist() == [0] * 4
    assert found["long"].versions.tolist()[:9] == [0] * 4 + [1] * 5
    for each in asked[:2]:
        assert_right(found[each.request_id], each)
    paused_at = next(i for i, (_, names) in enumerate(engine.ran) if "long" not in names)
    assert sum("long" in names for _, names in engine.ran[:paused_at]) == 9


def test_loop_steps_per_call_end_at_the_smallest_token_limit() -> None:
    """Otherwise a call with several steps would sample more tokens than allowed. This engine runs one step per call."""
    engine, heard = VersionedEngine(slots=2), Heard()
    serve(engine).submit([request("long", 5, 3), request("other", 9)], heard.put)
    completed(heard, 2)
    engine.loop.stop()
    assert engine.limits[:3] == [3, 2, 1]
    assert engine.limits[3:9] == [STEPS_PER_CALL] * 6, "the other has no limit"


class DraftingEngine(VersionedEngine):
    """Engine that samples up to four tokens of a request in a step, as with drafts."""

    def _limit_drafts(self, max_tokens: float) -> None:
        self.most = int(min(4, max_tokens))

    def _run_step(self, limit: int) -> list[StepOutput]:
        outputs = super()._run_step(limit)
        return [self._more(output) for output in outputs]

    def _more(self, output: StepOutput) -> StepOutput:
        entry = self._running[output.engine_id]
        first, length = len(entry.token_ids), entry.request.sampling.max_response_tokens
        places = range(first, min(first + self.most, length))
        drawn = [token(entry.request.seed, place, self.weight_version) for place in places]
        reason = "length" if first + len(drawn) == length else None
        return StepOutput(output.engine_id, drawn, [-float(each) for each in drawn], reason)


def test_loop_several_tokens_per_step_respect_token_limits() -> None:
    engine, heard = DraftingEngine(slots=2, swaps=(2, 6)), Heard()
    asked = [request("long", 30, 6), request("other", 25)]
    serve(engine).submit(asked, heard.put)
    found = completed(heard, 2)
    engine.loop.stop()
    for each in asked:
        assert_right(found[each.request_id], each)
    counts = np.bincount(found["long"].versions)
    assert counts[0] == counts[1] == 6
    assert max(np.bincount(found["other"].versions)) > 6


@pytest.mark.parametrize("seed", range(8))
def test_loop_random_limits_and_swaps_keep_tokens_right(seed: int, tmp_path: Path) -> None:
    """The journal always contains all sampled tokens; no response exceeds its limit while others could run."""
    chance = random.Random(seed)
    engine = VersionedEngine(chance.randint(1, 4), sorted(chance.sample(range(1, 120), 6)))
    path, counts = tmp_path / "journal", dict[tuple[str, int], int]()
    asked = {f"r{i}": request(f"r{i}", chance.randint(1, 40), chance.choice([None, 1, 3, 8]), seed=i) for i in range(9)}
    drawn: dict[str, int] = dict.fromkeys(asked, 0)

    def look() -> None:
        journaled = read_journal(path)
        for name, count in drawn.items():
            if count < asked[name].sampling.max_response_tokens:
                assert len(journaled[name].completion.token_ids if name in journaled else ()) == count
        running = [entry.request.request_id for entry in engine._running.values()][: engine.slots]
        for name in running:
            drawn[name] += 1
            key, limit = (name, engine.weight_version), asked[name].tokens_per_version
            counts[key] = counts.get(key, 0) + 1
            if limit is not None and counts[key] > limit:
                others = [other for other in engine.running_ids if asked[other].tokens_per_version is None]
                assert not others, "it waits while one without a limit runs"

    engine.before_pass = look
    heard = Heard()
    serve(engine, TokenJournal(path)).submit(list(asked.values()), heard.put)
    found = completed(heard, len(asked))
    engine.loop.stop()
    for name, completion in found.items():
        assert_right(completion, asked[name])
        assert read_journal(path)[name].finish_reason == "length"
    assert not engine.loop._paused._running
    assert sum(drawn.values()) == sum(each.sampling.max_response_tokens for each in asked.values())


class Parked:
    """Loop in which `long` has sampled 3 tokens and is paused, while `other` is blocked in a step, which may fail."""

    def __init__(self, path: Path) -> None:
        self.engine, self.heard, self.others, self.path = VersionedEngine(), Heard(), Heard(), path
        self.in_pass, self.go = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.engine.before_pass = self._hold
        self.loop = self.engine.loop = EngineLoop(self.engine, TokenJournal(path))
        self.asked = request("long", 8, 3)
        self.loop.submit_nowait([self.asked], self.heard.put)
        self.loop.submit_nowait([request("other", 40, seed=2)], self.others.put)
        start(self.loop)
        assert self.in_pass.wait(SECONDS)

    def _hold(self) -> None:
        if self.engine.running_ids == ["other"]:
            self.in_pass.set()
            assert self.go.wait(SECONDS)
            if self.error is not None:
                raise self.error

    def errors(self) -> list[str]:
        """Return the errors that both listeners receive."""
        return [repr(heard.get(timeout=SECONDS)) for heard in (self.heard, self.others)]

    def drawn(self) -> list[int]:
        """Return the tokens from which other engines would continue."""
        found = read_journal(self.path)["long"]
        assert (found.seed, found.finish_reason) == (1, None)
        return found.completion.token_ids.tolist()


@pytest.fixture
def parked(tmp_path: Path) -> Parked:
    return Parked(tmp_path / "journal")


FIRST = [token(1, index, 0) for index in range(3)]


def test_loop_abort_returns_the_paused_partial_response(parked: Parked) -> None:
    parked.go.set()
    (partial,) = parked.loop.abort(["long", "nobody"])
    assert (partial.finish_reason, partial.token_ids.tolist()) == ("abort", FIRST)
    assert parked.heard.empty()
    assert "long" not in read_journal(parked.path)
    parked.loop.submit([replace(parked.asked, partial=partial)], parked.heard.put)
    assert_right(completed(parked.heard)["long"], parked.asked)
    parked.loop.stop()


def test_loop_dead_engine_keeps_paused_response_in_journal(parked: Parked) -> None:
    assert parked.drawn() == FIRST
    parked.error = WorkerDiedError("rank 1 is gone")
    parked.go.set()
    assert parked.errors() == [repr(parked.error)] * 2
    assert parked.drawn() == FIRST
    partial = read_journal(parked.path)["long"].completion
    engine, heard = VersionedEngine(), Heard()
    engine.weight_version = 1
    serve(engine).submit([replace(parked.asked, partial=partial)], heard.put)
    found = completed(heard)["long"]
    assert_right(found, parked.asked)
    assert found.versions.tolist() == [0] * 3 + [1] * 5
    engine.loop.stop()


def test_loop_listener_of_paused_response_receives_errors(parked: Parked) -> None:
    parked.error = WeightSyncError("half an update")
    parked.go.set()
    assert parked.errors() == [repr(parked.error)] * 2
    assert parked.loop.between_steps(lambda: parked.engine.num_running) == 0
    parked.error = None
    parked.in_pass.clear()
    parked.go.clear()
    parked.loop.submit([parked.asked, request("other", 40)], parked.heard.put)
    assert parked.in_pass.wait(SECONDS)
    parked.loop.stop()
    parked.go.set()
    assert [str(parked.heard.get(timeout=SECONDS)) for _ in range(2)] == [ENDED] * 2
    with pytest.raises(RuntimeError, match=ENDED):
        parked.loop.between_steps(lambda: None)


def test_loop_rejected_resume_reaches_the_listener(parked: Parked) -> None:
    error = WeightSyncError("half an update")

    def refuse() -> None:
        raise error

    parked.engine._require_awake = refuse  # type: ignore[method-assign]
    parked.go.set()
    assert parked.errors() == [repr(error)] * 2
    assert parked.loop.between_steps(lambda: parked.engine.num_running) == 0
    parked.loop.stop()


def test_copy_journal_contains_paused_responses(parked: Parked, tmp_path: Path) -> None:
    parked.go.set()
    assert parked.loop.copy_journal(tmp_path / "copy", ["long"])
    assert read_journal(tmp_path / "copy")["long"].completion.token_ids.tolist()[:3] == FIRST
    parked.loop.stop()


def test_loop_new_weights_resume_before_later_calls(parked: Parked) -> None:
    parked.loop._post(parked.engine.swap)
    parked.loop.submit_nowait([request("late", 2)], parked.heard.put)
    parked.go.set()
    found = completed(parked.heard, 2)
    assert parked.engine.added[:4] == ["long", "other", "long", "late"]
    assert_right(found["long"], parked.asked)
    assert found["long"].versions.tolist() == [0] * 3 + [1] * 5
    parked.loop.stop()
