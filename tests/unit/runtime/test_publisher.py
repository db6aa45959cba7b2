"""Order of weight updates and comparisons if engines are lost meanwhile; all processes are fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import ray

from mcore_rl.errors import WeightSyncError, WorkerDiedError
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.publisher import SlicePublisher
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.transports.hosts import Host
from mcore_rl.weights.transports.topology import Endpoint, Topology
from mcore_rl.weights.verify import Comparison

WRONG = [Comparison(differing={"model.norm.weight"})]


@dataclass
class Processes:
    """Fake trainer ranks and engines. `events` records the calls of engines and the rendezvous. `fails[call, n]` is the
    effect of the n-th such call on the first engine. A lost engine is up again after `slow` further checks."""

    fails: dict[tuple[str, int], str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    num_engines: int = 1
    restarts: int = 0
    max_restarts: int = 3
    slow: int = 0
    starting: dict[int, int] = field(default_factory=dict)
    """Remaining checks until each starting engine is up."""
    without_weights: set[int] = field(default_factory=set)

    @property
    def publisher(self) -> SlicePublisher:
        endpoints = [Endpoint(Host("here", ("", 0)), "127.0.0.1")] * (self.num_engines + 1)
        topology = Topology((endpoints[0],), tuple(endpoints[1:]), 1)
        made = SlicePublisher(
            _Trainers(self), _Engines(self), _Plan(topology), SimpleNamespace(host="127.0.0.1", port=1)
        )  # type: ignore[arg-type]
        made.publish(1)
        self.events.clear()
        return made

    def asked(self, method: str) -> str:
        self.events.append(method)
        return self.fails.get((method, self.events.count(method)), "")


@dataclass(frozen=True)
class _Plan:
    topology: Topology
    num_tensors: int = 7


class _Call:
    """A GroupCall of one rank that has ended."""

    def __init__(self, result: object = None) -> None:
        self.references = [None]
        self._result = result

    def results(self) -> list[object]:
        return [self._result]

    def in_order(self, _: object) -> list[list[int]]:
        return [[0]]


class _Trainers:
    """Fake TrainerGroup."""

    def __init__(self, processes: Processes) -> None:
        self.watch, self.processes, self.stages = SimpleNamespace(get=list, dependent_seconds=9.0), (), Stages()

    def call(self, method: Callable[..., object], *arguments: object) -> _Call:
        return _Call({} if method.__name__ == "create_buffers" else None)


class _Engine:
    """Fake FleetEngine, which is also the handle of its process."""

    def __init__(self, processes: Processes, number: int) -> None:
        self.name, self._processes, self.number = f"rollout engine {number}", processes, number
        self.process = self

    @property
    def has_weights(self) -> bool:
        return self.number not in self._processes.without_weights

    def call(self, method: Callable[..., object], *arguments: object) -> object:
        return getattr(self, method.__name__)(*arguments)

    def receive_update(self, version: int, recompute: bool) -> list[object]:
        return self._answer("receive_update", [0])

    def compare_weights(self) -> list[object]:
        return self._answer("compare_weights", [Comparison()])

    def connect(self, connection: Connection, place: int) -> None:
        topology = connection.plan.topology
        assert topology.name(topology.member(place)) == f"{self.name} on here"
        self._processes.events.append(f"meet {self.number}")

    def _answer(self, method: str, well: list[object]) -> list[object]:
        fate = self._processes.asked(method) if self.number == 0 else ""
        if fate == "dies":
            raise _DiedError(self)
        return WRONG if fate == "differs" else well


class _DiedError(WorkerDiedError):
    def __init__(self, engine: _Engine) -> None:
        super().__init__(f"{engine.name} died")
        self.engine = engine


class _Engines:
    """Fake Fleet."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.max_restarts = processes, processes.max_restarts
        self.engines = [_Engine(processes, number) for number in range(processes.num_engines)]
        self.num_engines = processes.num_engines

    def up(self) -> list[_Engine]:
        starting = self.processes.starting
        if len(starting) == len(self.engines):
            starting.clear()
        for number in list(starting):
            starting[number] -= 1
            if starting[number] < 0:
                del starting[number]
        return [engine for engine in self.engines if engine.number not in starting]

    def mark_supplied(self, engines: Sequence[_Engine]) -> None:
        self.processes.without_weights -= {engine.number for engine in engines}

    def lose(self, engine: _Engine, why: str) -> None:
        if self.processes.restarts == self.max_restarts:
            raise WorkerDiedError(why)
        self.processes.restarts += 1
        self.processes.without_weights.add(engine.number)
        self.processes.starting[engine.number] = self.processes.slow

    def retry_on_engine_loss(self, call: Callable[[], object]) -> object:
        while True:
            try:
                return call()
            except _DiedError as error:
                self.lose(error.engine, str(error))


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda given: given)


def order(events: Iterable[str]) -> list[str]:
    short = {"receive_update": "send", "compare_weights": "compare", "meet 0": "meet"}
    return [short.get(event, event) for event in events]


def test_publish_connects_once_and_does_not_compare() -> None:
    processes = Processes()
    publisher = processes.publisher
    assert publisher.publish(2) == 2
    assert publisher.engines.version == 2
    assert publisher.verify() == 7
    assert order(processes.events) == ["send", "compare"]


def test_engine_lost_in_publish_is_connected_again_and_compared() -> None:
    processes = Processes()
    publisher = processes.publisher
    processes.fails["receive_update", 1] = "dies"
    publisher.publish(2)
    assert order(processes.events) == ["send", "meet", "send", "compare"]
    assert (publisher.engines.version, processes.restarts, processes.without_weights) == (2, 1, set())


def test_publish_skips_a_starting_engine_and_supplies_it_later() -> None:
    processes = Processes(num_engines=3, slow=2)
    publisher = processes.publisher
    processes.fails["receive_update", 1] = "dies"
    publisher.publish(2)
    assert order(processes.events) == ["send", "meet 1", "meet 2"]
    assert processes.without_weights == {0}
    assert publisher.verify() == 2 * 7
    publisher.publish(3)
    assert order(processes.events) == ["send", "meet 1", "meet 2"]
    publisher.publish(4)
    assert order(processes.events)[3:] == ["meet", "meet 1", "meet 2", "send", "compare"]
    assert processes.without_weights == set()
    assert publisher.verify() == 3 * 7


def test_engine_with_different_weights_is_left_out_until_restarted() -> None:
    processes = Processes(num_engines=2, slow=1)
    publisher = processes.publisher
    processes.fails["compare_weights", 1] = "differs"
    assert publisher.verify() == 7
    assert order(processes.events) == ["compare", "meet 1"]
    publisher.publish(2)
    assert order(processes.events)[2:] == ["meet", "meet 1", "send", "compare"]


def test_verify_after_a_loss_publishes_before_comparing_again() -> None:
    processes = Processes()
    publisher = processes.publisher
    processes.fails["compare_weights", 1] = "dies"
    assert publisher.verify() == 7
    assert order(processes.events)[:4] == ["compare", "meet", "send", "compare"]
    assert (publisher.engines.version, processes.restarts, processes.without_weights) == (1, 1, set())


def test_verify_restarts_an_engine_until_its_weights_are_equal() -> None:
    processes = Processes()
    publisher = processes.publisher
    processes.fails["compare_weights", 1] = "differs"
    assert publisher.verify() == 7
    assert order(processes.events)[:4] == ["compare", "meet", "send", "compare"]
    assert processes.restarts == 1


@pytest.mark.parametrize(("max_restarts", "error"), [(0, WeightSyncError), (2, WorkerDiedError)])
def test_verify_with_permanently_different_weights_names_the_tensor(max_restarts: int, error: type[Exception]) -> None:
    processes = Processes(max_restarts=max_restarts)
    publisher = processes.publisher
    processes.fails |= {("compare_weights", nth): "differs" for nth in range(1, 99)}
    with pytest.raises(error, match=r"model\.norm\.weight"):
        publisher.verify()
    assert processes.restarts == max_restarts
