"""Order of weight updates and comparisons if engines are lost meanwhile; all processes are fakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from torch.distributed import PrefixStore, TCPStore

from mcore_rl.errors import WeightSyncError, WorkerDiedError
from mcore_rl.runtime.engines.fleet import Fleet
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.publisher import SlicePublisher
from mcore_rl.types import Mean, Metric, Total
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.delta.copies import FrameBytes
from mcore_rl.weights.transports.hosts import Host
from mcore_rl.weights.transports.link import open_store
from mcore_rl.weights.transports.topology import Endpoint, Topology
from mcore_rl.weights.verify import Comparison
from tests.unit.runtime.engines import Engine, Process, Watch

WRONG = [Comparison(differing={"model.norm.weight"})]


class Run:
    """A publisher over fake trainer ranks and engines, after the first update. `events` are the updates and comparisons
    of engine 0 and the connections of all engines. `fates[event, n]` is the effect of the n-th such event."""

    def __init__(
        self, store: TCPStore, num_engines: int = 1, max_restarts: int = 3, delta: FrameBytes | None = None
    ) -> None:
        self.events, self.fates, self.watch = list[str](), dict[tuple[str, int], str](), Watch()
        self.watch.engines = [_Engine(number, self) for number in range(num_engines)]
        self.buffers = list[str]()
        """Calls that decide when staging buffers may be freed, of trainer ranks and of all engines."""
        self.notes, self.recorded, self.delta = list[str](), list[dict[str, Metric]](), delta
        self.fleet = Fleet([*self.watch.engines], cast(Any, self.watch), max_restarts, note=self.notes.append)
        endpoints = [Endpoint(Host("here", ("", 0)), "127.0.0.1")] * (num_engines + 1)
        plan = _Plan(Topology((endpoints[0],), tuple(endpoints[1:]), 1, delta=delta is not None))
        trainers = cast(Any, _Trainers(self))
        self.publisher = SlicePublisher(trainers, self.fleet, cast(Any, plan), store, record=self.recorded.append)
        self.publisher.publish(1)
        self.events.clear()

    @property
    def without_weights(self) -> list[int]:
        return [engine.number for engine in self.fleet.engines if not engine.has_weights]


@dataclass(frozen=True)
class _Plan:
    topology: Topology
    num_tensors: int = 7
    first_trained_round: int = 0


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

    def __init__(self, test: Run) -> None:
        self.test = test
        self.watch, self.processes, self.stages = SimpleNamespace(get=list, dependent_seconds=9.0), (), Stages()

    def call(self, method: Callable[..., object], *arguments: object) -> _Call:
        if method.__name__ in ("disconnect_weights", "create_buffers"):
            self.test.buffers.append(method.__name__)
        results = {"create_buffers": {}, "delta_bytes": self.test.delta}
        return _Call(results.get(method.__name__))


class _Process(Process):
    """Process of a fake engine that receives weights."""

    def __init__(self, engine: _Engine) -> None:
        super().__init__(engine.name)
        self.number, self.test = engine.number, engine.test

    def receive_update(self, version: int, recompute: bool, first_round: int) -> list[object]:
        return self._answer("send", [0])

    def compare_weights(self) -> list[object]:
        return self._answer("compare", [Comparison()])

    def join_gateway(self) -> list[object]:
        return self._answer("join", [])

    def connect(self, connection: Connection, place: int) -> None:
        topology = connection.plan.topology
        assert topology.name(topology.member(place)) == f"rollout {self.name} on here"
        self.test.events.append(f"meet {self.number}" if self.number else "meet")

    def disconnect(self) -> None:
        self.test.buffers.append(f"disconnect engine {self.number}")

    def _answer(self, event: str, well: list[object]) -> list[object]:
        if self.number > 0:
            return well
        self.test.events.append(event)
        fate = self.test.fates.get((event, self.test.events.count(event)), "")
        if fate == "dies":
            self.test.watch.dead[id(self)] = f"{self.name} died"
            raise WorkerDiedError("a process died")
        return WRONG if fate == "differs" else well


class _Engine(Engine):
    def __init__(self, number: int, test: Run) -> None:
        self.test = test
        super().__init__(number)

    def replace_processes(self) -> Any:
        self.process = _Process(self)
        self.all.append(self.process)
        return f"{self.name} starts"


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda given: given)


def test_publish_connects_once_and_does_not_compare(store: TCPStore) -> None:
    run = Run(store)
    assert run.publisher.publish(2) == 2
    assert run.fleet.version == 2
    assert run.publisher.verify() == 7
    assert run.events == ["send", "compare"]


def test_engine_lost_in_publish_is_connected_again_and_compared() -> None:
    store = open_store("127.0.0.1")  # without the losses of other tests
    run = Run(store)
    run.fates["send", 1] = "dies"
    run.publisher.publish(2)
    # Members that wait for the dead engine in NCCL read this.
    assert PrefixStore("weights/1", store).get("lost") == b"a process died"
    assert not PrefixStore("weights/2", store).check(["lost"])
    assert run.events == ["send", "meet", "send", "compare", "join"]
    assert (run.fleet.version, run.fleet.num_restarts, run.without_weights) == (2, 1, [])


@pytest.mark.parametrize("slow", [True, False])
def test_buffers_are_freed_after_all_living_processes_have_unmapped_them(store: TCPStore, slow: bool) -> None:
    """CUDA does not define what happens to mappings of freed memory. `create_buffers` frees the earlier ones."""
    run = Run(store, num_engines=3)
    assert run.buffers == ["create_buffers"]
    run.buffers.clear()
    run.fates["send", 1], run.watch.slow = "dies", {"engine 0"} if slow else set()
    run.publisher.publish(2)
    living = ["disconnect engine 1", "disconnect engine 2"]
    again = [] if slow else ["disconnect engine 0"]  # a new process, which has nothing to unmap
    assert run.buffers == ["disconnect_weights", *again, *living, "create_buffers"]


def test_publish_skips_a_starting_engine_and_supplies_it_later(store: TCPStore) -> None:
    run = Run(store, num_engines=3)
    run.fates["send", 1], run.watch.slow = "dies", {"engine 0"}
    run.publisher.publish(2)
    assert run.events == ["send", "meet 1", "meet 2"]
    assert run.without_weights == [0]
    assert run.publisher.verify() == 2 * 7
    run.publisher.publish(3)
    assert run.events == ["send", "meet 1", "meet 2"]
    run.watch.slow.clear()
    run.publisher.publish(4)
    assert run.events[3:] == ["meet", "meet 1", "meet 2", "send", "compare", "join"]
    assert run.without_weights == []
    assert run.publisher.verify() == 3 * 7


def test_restarted_engines_are_supplied_once_and_when_they_are_up(store: TCPStore) -> None:
    run = Run(store, num_engines=2, max_restarts=1)
    run.publisher.supply_restarted()
    assert run.events == []
    run.watch.dead[id(run.fleet.engines[0].process)] = "engine 0 died"
    run.watch.slow = {"engine 0"}
    for _ in range(2):
        run.publisher.supply_restarted()
        assert (run.events, run.without_weights) == ([], [0])
    run.watch.slow.clear()
    for _ in range(2):
        run.publisher.supply_restarted()
        assert (run.events, run.without_weights) == (["meet", "meet 1", "send", "compare", "join"], [])
    assert run.fleet.version == 1
    run.watch.dead[id(run.fleet.engines[1].process)] = "engine 1 died"
    with pytest.raises(WorkerDiedError, match=r"engine 1 died.*max_engine_restarts=1"):
        run.publisher.supply_restarted()


def test_engine_with_different_weights_is_left_out_until_restarted(store: TCPStore) -> None:
    run = Run(store, num_engines=2)
    run.fates["compare", 1], run.watch.slow = "differs", {"engine 0"}
    assert run.publisher.verify() == 7
    assert run.events == ["compare", "meet 1"]
    run.watch.slow.clear()
    run.publisher.publish(2)
    assert run.events[2:] == ["meet", "meet 1", "send", "compare", "join"]


def test_restarted_engine_joins_the_gateway_after_its_comparison(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of an engine with different weights is removed; others are kept."""
    run = Run(store, num_engines=2)
    engine = run.watch.engines[0]
    monkeypatch.setattr(_Engine, "journal", property(lambda self: str(tmp_path / f"{self.number}.{len(self.all)}")))
    for number in range(1, 4):
        (tmp_path / f"0.{number}").touch()
    run.watch.dead[id(engine.process)] = "engine 0 died"
    run.fates["compare", 1] = "differs"
    run.publisher.supply_restarted()
    supplied = ["meet", "meet 1", "send", "compare"]
    assert run.events == [*supplied, *supplied, "join", "compare"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.1", "0.3"]
    assert list(run.fleet.lost_journals.values()) == [str(tmp_path / "0.1")]
    run.publisher.publish(2)
    assert run.events[-1] == "send", "it joins once"


def test_engine_that_dies_while_it_joins_is_supplied_again(store: TCPStore) -> None:
    run = Run(store, num_engines=2)
    run.watch.dead[id(run.fleet.engines[0].process)] = "engine 0 died"
    run.fates["join", 1] = "dies"
    run.publisher.supply_restarted()
    assert (run.events[-1], run.without_weights) == ("join", [0])
    run.publisher.supply_restarted()
    assert (run.events[-1], run.without_weights) == ("join", [])


@pytest.mark.parametrize("fate", ["dies", "differs"])
def test_verify_after_a_loss_publishes_before_comparing_again(store: TCPStore, fate: str) -> None:
    run = Run(store)
    run.fates["compare", 1] = fate
    assert run.publisher.verify() == 7
    assert run.events[:4] == ["compare", "meet", "send", "compare"]
    assert (run.fleet.version, run.fleet.num_restarts, run.without_weights) == (1, 1, [])


@pytest.mark.parametrize(("max_restarts", "error"), [(0, WeightSyncError), (2, WorkerDiedError)])
def test_verify_with_permanently_different_weights_names_the_tensor(
    store: TCPStore, max_restarts: int, error: type[Exception]
) -> None:
    run = Run(store, max_restarts=max_restarts)
    run.fates |= {("compare", nth): "differs" for nth in range(1, 99)}
    with pytest.raises(error, match=r"model\.norm\.weight"):
        run.publisher.verify()
    assert run.fleet.num_restarts == max_restarts


def test_publish_with_deltas_records_their_bytes(store: TCPStore) -> None:
    run = Run(store, delta=FrameBytes(sent=30, content=1000))
    assert run.recorded == [{"weights/delta_bytes": Total(30), "weights/delta_share": Mean(30, 1000)}]
    assert Run(store).recorded == run.notes == []


def test_publish_with_deltas_that_nothing_needs_is_noted_once(store: TCPStore) -> None:
    run = Run(store, delta=FrameBytes())
    run.publisher.publish(2)
    assert run.recorded == []
    assert run.notes == ["weights.delta=true has no effect: all engine ranks receive weights from their own host"]
