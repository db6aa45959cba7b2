"""In which order weights are handed over and compared where engines are lost in between; processes are pretended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from mcore_rl.errors import WeightSyncError, WorkerDiedError
from mcore_rl.runtime.publisher import SlicePublisher
from mcore_rl.weights.verify import Comparison

WRONG = [Comparison(differing={"model.norm.weight"})]


@dataclass
class Processes:
    """Trainer ranks and an engine. `events` is what they were asked, `fails` what becomes of the nth time that the
    engine is asked something."""

    fails: dict[tuple[str, int], str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    restarts: int = 0
    max_restarts: int = 3
    without_weights: bool = False

    @property
    def publisher(self) -> SlicePublisher:
        plan = SimpleNamespace(topology=SimpleNamespace(windows=()), num_tensors=7)
        made = SlicePublisher(_Trainers(self), _Engines(self), plan, SimpleNamespace(port=1), "127.0.0.1", 9)  # type: ignore[arg-type]
        made.publish(1)
        self.events.clear()
        return made

    def asked(self, method: str) -> str:
        self.events.append(method)
        return self.fails.get((method, self.events.count(method)), "")


class _Call:
    def __init__(self, number: int) -> None:
        self.references = [None] * number

    def results(self, _: Any) -> list[list[int]]:
        return [[0]]


class _Trainers:
    def __init__(self, processes: Processes) -> None:
        self.handles = [SimpleNamespace(unlink_windows=SimpleNamespace(remote=lambda: None))]
        self.watch = SimpleNamespace(get=list)

    def begin(self, method: str, given: Any = None) -> _Call:
        return _Call(1)

    def on_every_rank(self, method: str, given: Any) -> list[dict[int, str]]:
        return [{}]


class _Engines:
    """What EnginePool does where an engine dies, without processes."""

    num_engines = 1

    def __init__(self, processes: Processes) -> None:
        self.processes, self.max_restarts = processes, processes.max_restarts
        self.engines = [SimpleNamespace(start=SimpleNamespace(name="rollout engine 0"))]
        connect = SimpleNamespace(remote=lambda *_: processes.events.append("meet"))
        self.handles = [SimpleNamespace(connect=connect)]

    @property
    def num_without_weights(self) -> int:
        return int(self.processes.without_weights)

    def settle(self) -> bool:
        return self.processes.without_weights

    def supplied(self) -> None:
        self.processes.without_weights = False

    def send(self, method: str, *_: Any) -> list[Any]:
        fate = self.processes.asked(method)
        if fate == "dies":
            raise WorkerDiedError("rollout engine 0 died")
        return [WRONG if fate == "differs" else [Comparison()] if method == "compare_weights" else []]

    def lose(self, engine: Any, why: str) -> None:
        if self.processes.restarts == self.max_restarts:
            raise WorkerDiedError(why)
        self.processes.restarts += 1
        self.processes.without_weights = True

    def insist(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except WorkerDiedError as error:
                self.lose(None, str(error))


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda given: given)


def order(events: Iterable[str]) -> list[str]:
    short = {"receive_update": "send", "compare_weights": "compare"}
    return [short.get(event, event) for event in events]


def test_a_publication_meets_once_and_compares_only_when_asked() -> None:
    processes = Processes()
    publisher = processes.publisher
    assert publisher.publish(2) == 2
    assert publisher.engines.version == 2
    assert publisher.verify() == 7
    assert order(processes.events) == ["send", "compare"]


def test_an_engine_lost_in_an_update_meets_anew_gets_it_and_is_compared() -> None:
    processes = Processes()
    publisher = processes.publisher
    processes.fails["receive_update", 1] = "dies"
    publisher.publish(2)
    assert order(processes.events) == ["send", "meet", "send", "compare"]
    assert (publisher.version, processes.restarts, processes.without_weights) == (2, 1, False)


def test_an_engine_lost_while_weights_are_compared_gets_them_before_they_are_compared_again() -> None:
    processes = Processes()
    publisher = processes.publisher
    processes.fails["compare_weights", 1] = "dies"
    assert publisher.verify() == 7
    assert order(processes.events)[:4] == ["compare", "meet", "send", "compare"]
    assert (publisher.version, processes.restarts, processes.without_weights) == (1, 1, False)


def test_an_engine_with_other_weights_starts_again_and_is_compared_until_it_has_them() -> None:
    processes = Processes()
    publisher = processes.publisher
    processes.fails["compare_weights", 1] = "differs"
    assert publisher.verify() == 7
    assert order(processes.events)[:4] == ["compare", "meet", "send", "compare"]
    assert processes.restarts == 1


@pytest.mark.parametrize(("max_restarts", "error"), [(0, WeightSyncError), (2, WorkerDiedError)])
def test_weights_that_are_never_right_end_the_run_by_tensor(max_restarts: int, error: type[Exception]) -> None:
    processes = Processes(max_restarts=max_restarts)
    publisher = processes.publisher
    processes.fails |= {("compare_weights", nth): "differs" for nth in range(1, 99)}
    with pytest.raises(error, match=r"model\.norm\.weight"):
        publisher.verify()
    assert processes.restarts == max_restarts
