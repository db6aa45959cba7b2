"""Calls of all ranks of an engine, with an executor that leaves unread answers in its queues as vLLM's does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcore_rl.engines.vllm.ranks import EngineRanks, RankMethods
from mcore_rl.errors import ConfigError, WeightSyncError, WorkerDiedError


class Worker(RankMethods):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def add(self, number: int) -> int:
        return 10 * self.rank + number

    def refuse(self, ranks: list[int], same: bool) -> str:
        if self.rank in ranks:
            raise ConfigError("set it" if same else f"set it on {self.rank}")
        return "done"

    def stumble(self) -> None:
        raise KeyError("no such layer")


class Executor:
    """Ranks in this process. `silent` ranks do not answer. Unread answers are returned first, as from a queue."""

    def __init__(self, num_ranks: int) -> None:
        self.queues: list[tuple[Worker, list[object]]] = [(Worker(rank), []) for rank in range(num_ranks)]
        self.silent: set[int] = set()
        self.timeouts: list[float | None] = []

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[object, ...] = (), kwargs: object = None
    ) -> list[object]:
        self.timeouts.append(timeout)
        for worker, answers in self.queues:
            answers.append(getattr(worker, method)(*args) if method == "answer" else method)
        if self.silent:
            raise TimeoutError("RPC call timed out.")
        return [answers.pop(0) for _, answers in self.queues]


class Engine:
    """The parts of vLLM's LLMEngine that EngineRanks uses."""

    def __init__(self, num_ranks: int) -> None:
        self.model_executor = Executor(num_ranks)

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[object, ...] = ()) -> list[object]:
        return self.model_executor.collective_rpc(method, timeout, args)


def test_call_returns_results_by_rank() -> None:
    assert EngineRanks(Engine(3), "engine 4", 60).call("add", 5) == [5, 15, 25]


@pytest.mark.parametrize(
    ("ranks", "same", "message"),
    [
        ([0, 1], True, "set it (engine 4, rank 0, 1 of 3)"),
        ([1], True, "set it (engine 4, rank 1 of 3)"),
        ([1, 2], False, "set it on 1 (engine 4, rank 1 of 3)"),
    ],
)
def test_call_project_error_keeps_type_and_names_ranks(ranks: list[int], same: bool, message: str) -> None:
    calls = EngineRanks(Engine(3), "engine 4", 60)
    with pytest.raises(ConfigError) as caught:
        calls.call("refuse", ranks, same)
    assert str(caught.value) == message
    assert calls.call("add", 1) == [1, 11, 21]


def test_call_error_of_single_rank_names_engine_only() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineRanks(Engine(1), "engine 4", 60).call("refuse", [0], True)
    assert str(caught.value) == "set it (engine 4)"


@pytest.mark.parametrize(("method", "end"), [("stumble", "KeyError: 'no such layer'"), ("remove", "'remove'")])
def test_call_other_error_includes_end_of_traceback(method: str, end: str) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        EngineRanks(Engine(2), "engine 4", 60).call(method)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"engine 4, rank 0, 1 of 2 failed in `{method}`:"
    assert lines[-1].endswith(end)
    assert any("ranks.py" in line for line in lines)


def test_call_missing_answer_fails_all_later_calls() -> None:
    engine = Engine(2)
    calls = EngineRanks(engine, "engine 4", 60)
    engine.model_executor.silent = {1}
    with pytest.raises(WorkerDiedError, match=r"engine 4: not every rank answered `add` within 60 s \(cluster\.coll"):
        calls.call("add", 1)
    engine.model_executor.silent = set()
    with pytest.raises(WorkerDiedError, match="not every rank answered `add`"):
        calls.call("add", 2)
    with pytest.raises(WorkerDiedError, match="not every rank answered `add`"), calls.waiting("execute_model"):
        pytest.fail("a step would take the answer of `add` for its own")


def test_call_timeout_reports_process_states() -> None:
    engine = Engine(1)
    calls = EngineRanks(engine, "engine 4", 60)
    gone = 2**22 + 1  # above the kernel's highest process id
    engine.model_executor.workers = [SimpleNamespace(rank=0, proc=SimpleNamespace(pid=gone))]  # type: ignore[attr-defined]
    engine.model_executor.silent = {0}
    with pytest.raises(WorkerDiedError, match=rf"rank 0 \(process {gone}\) is gone"):
        calls.call("add", 1)


def test_engine_ranks_calls_by_vllm_have_deadline() -> None:
    engine = Engine(2)
    calls = EngineRanks(engine, "engine 4", 60)
    engine.model_executor.collective_rpc("sleep", kwargs={"level": 1})
    engine.model_executor.collective_rpc("execute_model", timeout=300)
    calls.call("add", 1)
    assert engine.model_executor.timeouts == [60, 300, 60]
    engine.model_executor.silent = {0}
    with pytest.raises(WorkerDiedError, match="`sleep`"), calls.waiting("sleep"):
        engine.model_executor.collective_rpc("sleep")


def test_waiting_error_of_caller_passes_through() -> None:
    calls = EngineRanks(Engine(1), "engine 4", 60)
    with pytest.raises(WeightSyncError, match="mine"), calls.waiting("execute_model"):
        raise WeightSyncError("mine")
    assert calls.call("add", 1) == [1]
