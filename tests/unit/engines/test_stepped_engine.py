"""Steps of an engine whose requests have stop strings, next to requests that have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.engines.step_output import StepOutput
from mcore_rl.errors import DataError
from mcore_rl.types import GenerationRequest, JsonFormat, SamplingOptions
from tests.unit.rollout.fake_engine import FakeEngine


class LimitedEngine(FakeEngine):
    """Records the limit of passes of each step."""

    def __init__(self) -> None:
        super().__init__()
        self._decode = lambda ids: "".join(f"<{token}>" for token in ids)
        self.limits: list[int] = []

    def _run_step(self, limit: int) -> list[StepOutput]:
        self.limits.append(limit)
        return super()._run_step(limit)


def request(name: str, *stop: str) -> GenerationRequest:
    return GenerationRequest(name, np.array([3, 4], np.int32), 1, SamplingOptions(20, stop=stop))


def test_step_runs_one_pass_while_a_request_has_stop_strings() -> None:
    engine = LimitedEngine()
    engine.submit([request("plain"), request("stopped", "<3>")])
    steps = [engine.step(4) for _ in range(5)]
    assert [[done.request_id for done in ended] for _, ended in steps] == [[], [], ["stopped"], [], []]
    assert engine.limits == [1, 1, 1, 4, 4]
    engine.submit([request("again", "<2>")])
    assert [len(engine.step(4)[1]) for _ in range(3)] == [0, 1, 0]
    assert engine.limits[5:] == [1, 1, 4]


def test_engine_without_formats_refuses_a_request_with_one() -> None:
    engine, plain = LimitedEngine(), request("formatted")
    with pytest.raises(DataError, match="does not enforce formats of replies; set it to vllm"):
        engine.submit([replace(plain, sampling=replace(plain.sampling, format=JsonFormat()))])
    assert engine.num_running == 0
