"""Packed calls carry one `bytes` object each way, and scheduler copies equal those of dataclasses.replace."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.driver.load import make_episodes, make_scalars
from mcore_rl.rollout.tasks import Until
from mcore_rl.runtime.calls import ProcessHandle, packed, remote_method, unpacked
from mcore_rl.runtime.engines.process import EngineProcess, EngineReport
from mcore_rl.runtime.roles.origins import marks_errors, origin_of
from mcore_rl.types import RolloutScalars, RolloutTask, SamplingOptions
from mcore_rl.types.copies import changed

IDS = np.arange(4)
TASK = RolloutTask("train", IDS, IDS, 2, SamplingOptions(16, stop=("end",)), 7, "records")


@marks_errors
class Engine:
    name = "engine 0"

    @remote_method(concurrency_group="run")
    @packed
    def run(self, tasks: list[tuple[int, RolloutTask]], until: Until, released: list[int]) -> EngineReport:
        if released:
            raise KeyError(released[0])
        ended = [(number, number + 1, make_episodes(task)) for number, task in tasks]
        return EngineReport(ended, len(ended), 0, 0.5, 0)


class Actor:
    """Actor in this process that records what Ray would serialize."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, ...]] = []
        self.received: list[object] = []
        self.run = self

    def remote(self, *arguments: Any) -> object:
        self.sent.append(arguments)
        self.received.append(Engine().run(*arguments))
        return self.received[-1]


def test_packed_call_sends_one_bytes_object_each_way() -> None:
    actor = Actor()
    handle = ProcessHandle[Any]("engine 0", cast(Any, actor))
    result = handle.call(Engine.run, [(3, TASK), (5, TASK)], Until.ASKS, [])
    assert [[type(value) for value in sent] for sent in actor.sent] == [[bytes]]
    assert type(actor.received[0]) is bytes
    report = cast(EngineReport, unpacked(cast(object, result)))
    assert [(number, key) for number, key, _ in report.ended] == [(3, 4), (5, 6)]
    for *_, scalars in report.ended:
        _assert_equal(scalars, make_episodes(TASK))


def _assert_equal(scalars: RolloutScalars, expected: RolloutScalars) -> None:
    for field in fields(RolloutScalars):
        ours, theirs = getattr(scalars, field.name), getattr(expected, field.name)
        if isinstance(theirs, dict):
            assert list(ours) == list(theirs)
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
        elif isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)
        else:
            assert ours == theirs


def test_packed_call_that_fails_names_its_process() -> None:
    handle = ProcessHandle[Any]("engine 0", cast(Any, Actor()))
    with pytest.raises(KeyError) as raised:
        handle.call(Engine.run, [], Until.ALL, [4])
    assert str(origin_of(raised.value)).startswith("engine 0")


def test_unpacked_returns_results_of_other_methods_unchanged() -> None:
    report = EngineReport([], 1, 2, 3.0, 4)
    assert unpacked(report) is report


def test_engine_calls_with_tasks_are_packed_and_have_ray_signatures() -> None:
    """Ray checks the arguments of a call against the signature of the method."""
    for method in (EngineProcess.run, EngineProcess.begin):
        parameters = inspect.signature(method).parameters
        assert list(parameters)[:2] == ["self", "arguments"]
    assert list(inspect.signature(EngineProcess.give_up).parameters)[:2] == ["self", "free"]


def test_changed_equals_replace_and_keeps_the_original() -> None:
    assert changed(TASK, version=3, journals=("a",)) == replace(TASK, version=3, journals=("a",))
    assert (TASK.version, TASK.journals) == (0, ())
    scalars = make_scalars(TASK)
    _assert_equal(changed(scalars, seconds_generating=2.5), replace(scalars, seconds_generating=2.5))


def test_changed_with_unknown_field_fails() -> None:
    with pytest.raises(AssertionError, match="RolloutTask has no versions"):
        changed(TASK, versions=3)
