"""Replay of a run: weights change at the recorded tokens, and steps train the recorded groups."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.rollout.journal import TokenJournal
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.rollout.streaming.collector import SwappingPublisher
from mcore_rl.rollout.streaming.paused_requests import PausedRequests
from mcore_rl.rollout.streaming.replay import Replay, read_replay
from mcore_rl.rollout.trajectories import version_spans
from mcore_rl.types import Completion, Delta, Groups
from tests.unit.rollout.made import drawn_and_dropped, made_scalars
from tests.unit.rollout.streaming.streamed import SAMPLES, SIZE, Stream, collector_of, some
from tests.unit.rollout.streaming.test_collector import FakePublisher, trained
from tests.unit.rollout.streaming.test_paused_requests import (
    SECONDS,
    Heard,
    VersionedEngine,
    assert_right,
    completed,
    serve,
)
from tests.unit.rollout.streaming.test_paused_requests import request as request_of


@pytest.mark.parametrize("seed", range(6))
def test_loop_spans_prescribe_versions_of_tokens(seed: int, tmp_path: Path) -> None:
    """Independent of other requests, their order and placement: one engine has the work of two, or two have the work of
    one."""
    chance = random.Random(seed)
    asked = [request_of(f"r{i}", chance.randint(1, 40), seed=i) for i in range(8)]
    engine, heard = VersionedEngine(chance.randint(1, 5), sorted(chance.sample(range(1, 60), 5))), Heard()
    serve(engine).submit(asked, heard.put)
    first = completed(heard, len(asked))
    engine.loop.stop()
    assert any(len(set(each.versions.tolist())) > 1 for each in first.values())

    given = [replace(each, spans=tuple(map(tuple, version_spans(first[each.request_id].versions)))) for each in asked]
    chance.shuffle(given)
    engines = [VersionedEngine(chance.randint(1, 5)) for _ in range(chance.randint(1, 2))]
    heard = Heard()
    for index, each in enumerate(engines):
        serve(each, TokenJournal(tmp_path / f"journal {index}")).submit(given[index :: len(engines)], heard.put)
    for _ in range(6):
        for each in engines:
            until_it_rests(each)
            each.loop.between_steps(each.swap)
    again = completed(heard, len(asked))
    for each in engines:
        each.loop.stop()
    for name, completion in again.items():
        assert_right(completion, next(each for each in asked if each.request_id == name))
        assert completion.token_ids.tolist() == first[name].token_ids.tolist()
        assert completion.versions.tolist() == first[name].versions.tolist()


def until_it_rests(engine: VersionedEngine) -> None:
    until = time.monotonic() + SECONDS
    while engine.loop.between_steps(lambda: engine.num_running):
        assert time.monotonic() < until


def test_loop_paused_unstarted_response_can_be_withdrawn() -> None:
    engine, heard = VersionedEngine(), Heard()
    late = [replace(request_of(name, 4), spans=((1, 0, 2), (2, 2, 4))) for name in ("a", "b", "c")]
    loop = serve(engine)
    loop.submit(late, heard.put)
    assert loop.between_steps(lambda: engine.num_running) == 0
    assert loop.num_paused == 3
    loop.withdraw(lambda unbegun: [name for name in unbegun if name == "a"])
    withdrawn = heard.get(timeout=SECONDS)
    assert isinstance(withdrawn, Completion)
    assert (withdrawn.request_id, withdrawn.finish_reason, len(withdrawn.token_ids)) == ("a", "abort", 0)
    (aborted,) = loop.abort(["b"])
    assert (aborted.request_id, len(aborted.token_ids), loop.num_paused) == ("b", 0, 1)
    for _ in range(2):
        loop.between_steps(engine.swap)
        until_it_rests(engine)
    assert completed(heard)["c"].versions.tolist() == [1, 1, 2, 2]
    assert len(engine.ran) == 4
    loop.stop()


def test_loop_with_only_paused_responses_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    go_on = EngineLoop._resume_paused
    monkeypatch.setattr(EngineLoop, "_resume_paused", lambda loop: (looks.append(1), go_on(loop)))
    loop = serve(VersionedEngine())
    loop.submit([replace(request_of("a", 4), spans=((1, 0, 4),))], Heard().put)
    before = len(looks)
    time.sleep(0.1)
    assert len(looks) <= before + 1
    assert loop.seconds_stuck == 0
    loop.stop()


def test_paused_requests_early_weights_keep_the_span_limit() -> None:
    parking = PausedRequests()
    assert parking.add([replace(request_of("a", 9), spans=((0, 0, 3), (1, 3, 6), (2, 6, 9)))], 0) == []
    assert parking.count([Delta("a", [1], [0.0], 0)], 0) == []
    parking.set_version(1)
    assert [parking.count([Delta("a", [1], [0.0], 1)], 1) for _ in range(5)] == [[]] * 4 + [["a"]]


def run(stream: Stream, tmp_path: Path, steps: int, replay: Replay | None = None) -> list[Groups]:
    rollout, dynamic = {"max_staleness": 2, "swap": "recompute"}, {"enable": True, "max_batches": 2}
    collector = collector_of(stream, tmp_path, rollout=rollout, dynamic=dynamic, replay=replay, steps=20)
    publisher = SwappingPublisher(FakePublisher(stream, may_run=True), collector)
    publisher.publish(0)
    collected = []
    for step in range(1, steps + 1):
        collected.append(collector.collect(step))
        if stream.underway:
            stream.end(stream.choose(sorted(stream.underway)))
        publisher.publish(step)
    return collected


def told(collected: list[Groups]) -> list[Any]:
    """Return for each step its groups with prompts and submission versions, and which were trained."""
    return [
        (
            [(int(s.group_ids[0]), int(s.prompt_rows[0]), int(s.versions[0, 0])) for s in groups.scalars],
            trained(groups),
            drawn_and_dropped(groups),
        )
        for groups in collected
    ]


@pytest.mark.parametrize("dull", ["some", "nearly all"])
@pytest.mark.parametrize("seed", range(3))
def test_replay_trains_the_recorded_groups_in_any_order(seed: int, dull: str, tmp_path: Path) -> None:
    """After the recorded steps, the run continues with the usual rules."""

    def stream_of(seed: int, slots: int) -> Stream:
        stream = Stream(some(seed), slots=slots)
        stream.dull = lambda group: group % 3 == 0 if dull == "some" else group % 9 != 0
        return stream

    first = run(stream_of(seed, 40), tmp_path, 12)
    recorded = {number: version for groups in told(first) for number, _, version in groups[0]}
    submitted = [0] * (max(recorded) + 1)
    for number in range(len(submitted)):
        submitted[number] = recorded.get(number, submitted[number - 1] if number else 0)
    of_step = {step: [each[0] for each in groups[0]] for step, groups in enumerate(told(first), start=1)}
    stream = stream_of(seed + 100, 20)
    again = run(stream, tmp_path, 20, Replay(of_step, submitted, {}))
    assert told(again[:12]) == told(first)
    assert stream.rests == 12, "weights wait for what they are not to draw, as long as there is something to repeat"
    every = [group for groups in again for group in trained(groups)]
    assert len(every) == len(set(every)) == 20 * SIZE


def test_replay_tasks_have_spans_and_results_are_compared(tmp_path: Path) -> None:
    right, wrong = (((0, 0, 1),),) * SAMPLES, (((0, 0, 2),),) * SAMPLES
    replay = Replay({1: [0, 1, 2, 3]}, [0] * 4, {0: right, 1: right, 2: wrong})
    stream = Stream(lambda tickets: tickets[:1])
    collector = collector_of(stream, tmp_path, rollout={"max_staleness": 2, "swap": "recompute"}, replay=replay)
    collector.published(0)
    assert [task.spans for task in stream.begun] == [right, right, wrong, ()]
    stream.end([0, 1])
    with pytest.raises(McoreRLError, match="replay diverged at group 2"):
        collector.collect(1)


def test_replay_diverging_group_is_named() -> None:
    replay = Replay({1: [0]}, [0], {0: (((0, 0, 3),), ((0, 0, 2), (1, 2, 9)))})
    versions = np.array([[0, 0], [0, 1]], np.int32)
    scalars = made_scalars([1, 1], response_tokens=np.array([3, 9], np.int32), versions=versions)
    replay.check_same(0, scalars)
    replay.check_same(7, scalars)  # which had not ended
    with pytest.raises(McoreRLError, match=r"replay diverged at group 0: \[3, 8\] tokens instead of \[3, 9\]"):
        replay.check_same(0, replace(scalars, response_tokens=np.array([3, 8], np.int32)))
    with pytest.raises(McoreRLError, match="group 0"):
        replay.check_same(0, replace(scalars, versions=np.zeros((2, 2), np.int32)))


def write_run(directory: Path, swap: str = "recompute", samples: int = 2) -> None:
    records = directory / "rollouts"
    records.mkdir(parents=True)
    (directory / "config.yaml").write_text(f"rollout:\n  swap: {swap}\n  max_staleness: 1\n")
    for step, groups in {1: [(0, 0), (1, 0)], 2: [(4, 1), (2, 0)], 4: [(5, 3)]}.items():
        lines = [
            {"group": group, "sample": sample, "submitted_version": version, "versions": [[version, 0, 3 + sample]]}
            for group, version in groups
            for sample in range(samples)
        ]
        (records / f"step_{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_read_replay_returns_the_recorded_schedule(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    replay = read_replay(tmp_path / "run", 2)
    assert replay.of_step == {1: [0, 1], 2: [2, 4]}, "up to the first step that is missing"
    assert replay.submitted == [0, 0, 0, 0, 1], "that of number 3, which had not ended, is not known"
    assert replay.spans[4] == (((1, 0, 3),), ((1, 0, 4),))
    assert [replay.was_submitted(number, 0) for number in range(6)] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "config.yaml").unlink(), r"not a run directory: it has no config\.yaml"),
        (lambda run: (run / "config.yaml").write_text("rollout: {swap: keep, max_staleness: 1}"), "swap=keep: only"),
        (lambda run: (run / "config.yaml").write_text("rollout: {max_staleness: 0}"), "max_staleness=0"),
        (lambda run: (run / "rollouts" / "step_1.jsonl").unlink(), r"no rollouts/step_1\.jsonl"),
    ],
)
def test_read_replay_unsuitable_run_is_rejected(spoil: Any, message: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    spoil(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"rollout\.replay_schedule=.*{message}"):
        read_replay(tmp_path / "run", 2)


def test_read_replay_other_group_size_is_rejected(tmp_path: Path) -> None:
    write_run(tmp_path / "run", samples=3)
    with pytest.raises(ConfigError, match=r"groups do not have rollout\.samples_per_prompt=2"):
        read_replay(tmp_path / "run", 2)
