"""Engines that die at any call while trainer ranks share their devices: both never use a device at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch.distributed as dist

from mcore_rl.errors import WorkerDiedError
from mcore_rl.runtime.engines.fleet import PARTS, Fleet
from mcore_rl.runtime.phases import DevicePhases, Phase, Stages, staged
from mcore_rl.runtime.publisher import SlicePublisher
from mcore_rl.types import Metric, Total
from mcore_rl.weights.delta.copies import FrameBytes
from mcore_rl.weights.transports.hosts import Host
from mcore_rl.weights.transports.topology import Endpoint, Topology
from mcore_rl.weights.verify import Comparison
from tests.unit.runtime import engines as fakes

STATE = {"params", "grads", "optimizer"}


@dataclass(frozen=True)
class Plan:
    topology: Topology
    num_tensors: int = 1
    first_trained_round: int = 0


class Process(fakes.Process):
    """Process of a fake engine. Every call counts, and the call number `machine.dies_at` of engine 0 is its last."""

    def __init__(self, machine: Machine, number: int) -> None:
        super().__init__(f"engine {number}")
        self.machine, self.number, self.awake = machine, number, set(PARTS)

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        machine, event = self.machine, method.__name__
        if self.number == 0:
            machine.events.append(event)
            if len(machine.events) == machine.dies_at:
                machine.watch.dead[id(self)] = f"{self.name} died"
                if not machine.dies_silently:
                    raise WorkerDiedError("a process died")
        if event == "receive_update":
            machine.updates.append((self.number, arguments[2]))
        if event == "sleep":
            self.awake.clear()
        if event == "wake_up":
            self.awake.add(arguments[0])
        return {"sleep": 1, "receive_update": [0], "compare_weights": [Comparison()], "drain_spans": []}.get(event)


class Engine(fakes.Engine):
    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        super().__init__(number)

    def replace_processes(self) -> Any:
        self.machine.require_room()
        self.process = Process(self.machine, self.number)  # type: ignore[assignment]
        self.all.append(self.process)
        return f"{self.name} starts"


class Watch(fakes.Watch):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.get, self.dependent_seconds = list, 9.0

    def get_started(self, starts: Mapping[object, Sequence[fakes.Process]]) -> None:
        self.machine.require_room()


class Machine:
    """Trainer ranks and engines on the same devices, through the steps of a run."""

    def __init__(
        self,
        store: dist.TCPStore,
        num_engines: int,
        dies_at: int = 0,
        *,
        dies_silently: bool = False,
        first_trained_round: int = 0,
    ) -> None:
        self.dies_at, self.dies_silently = dies_at, dies_silently
        self.events, self.of_trainer = list[str](), set[str]()
        self.updates: list[tuple[int, int]] = []
        """Number of the engine and first round of each update that an engine received."""
        self.watch = Watch(self)
        self.engines = self.watch.engines = [Engine(self, number) for number in range(num_engines)]
        self.fleet = Fleet([*self.engines], cast(Any, self.watch), 1, note=str)
        self.stages, self.processes = Stages(), ()
        self.stages.phases = DevicePhases(
            cast(Any, self), self.fleet, record=lambda _: None, span=lambda _: nullcontext()
        )
        endpoints = [Endpoint(Host("here", ("", 0)), "127.0.0.1")] * (num_engines + 1)
        topology = Topology((endpoints[0],), tuple(endpoints[1:]), 1, delta=True)
        plan = Plan(topology, first_trained_round=first_trained_round)
        self.recorded: list[dict[str, Metric]] = []
        self.publisher = SlicePublisher(
            cast(Any, self), self.fleet, cast(Any, plan), store, record=self.recorded.append
        )

    def require_room(self) -> None:
        assert not self.of_trainer, f"an engine starts beside {self.of_trainer}"

    # TrainerGroup:
    def offload(self, parts: Sequence[str]) -> int:
        self.of_trainer -= set(parts)
        return 0

    def call(self, method: Callable[..., object], *_: object) -> SimpleNamespace:
        if method.__name__ in ("send_weights", "send_digests"):
            self.load({"params"}, beside={"weights"})
        made = {"create_buffers": {}, "delta_bytes": FrameBytes(sent=30, content=1000)}.get(method.__name__)
        return SimpleNamespace(references=[None], results=lambda: [made], in_order=lambda _: [[0]])

    def load(self, state: set[str], beside: set[str]) -> None:
        for engine in self.engines:
            if id(engine.process) not in self.watch.dead:
                assert engine.starting is None, f"trainer ranks load while {engine.name} starts"
                assert engine.process.awake <= beside, f"trainer ranks load beside {engine.process.awake}"  # type: ignore[attr-defined]
        self.of_trainer |= state

    # Calls of a run:
    @staged(None, Phase.GENERATE)
    def generate(self) -> None:
        assert not self.of_trainer
        self.fleet.reap_failed()
        if not all(engine.serves for engine in self.engines):
            self.publisher.publish(self.fleet.version)  # Scheduler.supply
            with self.stages.stage(phase=Phase.GENERATE):
                pass
        assert all(engine.process.awake == PARTS for engine in self.engines)  # type: ignore[attr-defined]

    @staged(None, Phase.REPLACE)
    def update(self) -> None:
        self.load(STATE, beside=set())

    @staged(None, Phase.KEEP)
    def save(self) -> None:
        self.load(STATE, beside=set())

    def run(self) -> None:
        """Run two steps. Spans are drained in every phase."""
        self.fleet.sleep(keep_weights=False)  # see launch
        self.publisher.publish(0)
        for version in (1, 2):
            for call in (self.generate, self.save, self.save, self.generate, self.update, self.update):
                call()
                self.fleet.spans()
            self.publisher.publish(version)
            self.publisher.verify()
            self.fleet.spans()
            self.save()
            self.fleet.spans()
            self.publisher.publish(version)
        self.generate()


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda given: given)


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_engine_dies_at_any_call_and_restarts_without_trainer_state(
    store: dist.TCPStore, num_engines: int, silently: bool
) -> None:
    """`Machine` checks the memory at every start of an engine and at every load of trainer state."""
    whole = Machine(store, num_engines)
    whole.run()
    assert {"sleep", "wake_up", "connect", "receive_update", "compare_weights", "drain_spans"} <= set(whole.events)
    for dies_at in range(2, len(whole.events) + 1):  # the first call belongs to the launch
        machine = Machine(store, num_engines, dies_at, dies_silently=silently)
        machine.run()
        assert machine.fleet.num_restarts == 1, f"call {dies_at}, {machine.events[dies_at - 1]}"
        assert all(engine.serves for engine in machine.engines)


def test_engines_that_discard_their_weights_receive_frozen_ones_again(store: dist.TCPStore) -> None:
    machine = Machine(store, 2, first_trained_round=3)
    machine.run()
    # publish(version) follows `save`, for which engines keep their weights, and `update`, for which they do not.
    assert machine.updates == [(0, 0), (1, 0), *[(0, 0), (1, 0), (0, 3), (1, 3)] * 2]


def test_frozen_weights_are_sent_again_to_a_restarted_engine_only(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(store, 3, first_trained_round=3)
    machine.stages.phases = machine.fleet.make_room = None  # engines have devices of their own
    monkeypatch.setattr(machine, "load", lambda state, beside: None)
    for version in (0, 1):
        machine.publisher.publish(version)
    assert machine.updates == [(number, first) for first in (0, 3) for number in range(3)]
    machine.updates.clear()
    machine.fleet.lose(machine.engines[1], "engine 1 died")
    machine.engines[1].starting = None
    machine.publisher.publish(2)
    assert machine.updates == [(1, 0), (0, 3), (1, 3), (2, 3)]
    assert [each["weights/delta_bytes"] for each in machine.recorded] == [Total(30)] * 3  # one per version
    machine.updates.clear()
    machine.publisher.publish(3)
    assert machine.updates == [(0, 3), (1, 3), (2, 3)]
