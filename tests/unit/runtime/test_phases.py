"""Phases of engines and trainer ranks that share a device."""

from __future__ import annotations

import contextlib
import itertools
from contextlib import AbstractContextManager

import pytest

from mcore_rl.config.rules.device_sharing import shares_device
from mcore_rl.config.schema import Config
from mcore_rl.errors import WorkerDiedError
from mcore_rl.runtime.phases import DevicePhases, Phase, Stages, staged
from mcore_rl.types import Total


class Device:
    """Fake trainer ranks and engines on one device. Records all moves; checks memory and contents."""

    def __init__(self) -> None:
        self.moves: list[str] = []
        self.of_trainer: set[str] = {"params", "grads", "optimizer"}
        self.of_engine: set[str] = set()
        self.weights_are_defined = False
        self.sleep_error: Exception | None = None
        self.metrics: dict[str, object] = {}
        self.phases = DevicePhases(self, self, record=self.metrics.update, span=self.span)
        self.stages = Stages(self.span, self.phases)

    def offload(self, parts: tuple[str, ...]) -> int:
        self.moves.append("offload " + "+".join(parts))
        self.of_trainer -= set(parts)
        return 3 - len(self.of_trainer)

    @property
    def awake(self) -> frozenset[str]:
        return frozenset(self.of_engine)

    def settle(self) -> None: ...

    def sleep(self, keep_weights: bool) -> int:
        assert "weights" in self.of_engine
        if self.sleep_error is not None:
            error, self.sleep_error = self.sleep_error, None
            raise error
        self.moves.append("sleep, weights kept" if keep_weights else "sleep")
        freed, self.of_engine = len(self.of_engine), set()
        self.weights_are_defined &= keep_weights
        return freed

    def wake_up(self, part: str) -> None:
        self.moves.append(f"wake {part}")
        allowed = {"weights": {"params"}, "kv_cache": set()}[part]
        assert self.of_trainer <= allowed, f"{part} woke beside {self.of_trainer}"
        assert part == "weights" or "weights" in self.of_engine
        self.of_engine.add(part)

    def span(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    # Calls of a run:
    @staged(None, Phase.REPLACE, guest=True)
    def score(self) -> None:
        self.moves.append("score")

    @staged(None, Phase.GENERATE)
    def run(self) -> None:
        self.moves.append("generate")
        assert self.of_engine == {"weights", "kv_cache"}
        assert self.weights_are_defined

    @staged("update", Phase.REPLACE)
    def update(self) -> None:
        self.moves.append("update")
        assert not self.of_engine, "the ranks load beside the engine"
        self.of_trainer = {"params", "grads", "optimizer"}

    @staged(None, Phase.KEEP)
    def save(self) -> None:
        self.moves.append("save")
        assert not self.of_engine
        self.of_trainer |= {"params", "optimizer"}

    @staged("weight_sync", Phase.SYNC)
    def publish(self) -> None:
        self.moves.append("sync")
        assert self.of_engine == {"weights"}
        self.of_trainer.add("params")
        self.weights_are_defined = True


def test_phases_step_moves_memory_once_and_in_order() -> None:
    device = Device()
    device.publish()
    for _ in range(2):
        device.moves.clear()
        device.run()
        device.run()  # a refill: nothing moves
        device.update()
        device.update()
        device.publish()
    assert device.moves == [
        "offload params+grads+optimizer",
        "wake kv_cache",
        "generate",
        "generate",
        "sleep",
        "update",
        "update",
        "offload grads+optimizer",
        "wake weights",
        "sync",
    ]
    assert device.metrics == {"memory/offloaded_bytes": Total(3), "memory/engine_released_bytes": Total(2)}


def test_phases_measure_memory_at_four_points_of_a_step() -> None:
    device = Device()
    device.publish()
    device.run()
    device.phases.at_point = lambda point: device.moves.append(f"measure {point}")
    device.moves.clear()
    for call in (device.update, device.publish, device.run):
        call()
    assert device.moves == [
        *("sleep", "measure asleep", "update"),
        *("offload grads+optimizer", "wake weights", "measure weights_awake", "sync"),
        *("measure updated", "offload params+grads+optimizer", "wake kv_cache", "measure kv_cache_awake", "generate"),
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_trainers_free_their_caches_before_another_model_computes(shared: bool) -> None:
    """Also without phases: the model is on GPUs of trainer ranks even if engines are not."""
    device = Device()
    device.publish()
    device.stages.free_cache = lambda: device.moves.append("free")
    device.stages.phases = device.phases if shared else None
    device.of_engine = device.of_engine if shared else set()
    device.moves.clear()
    for call in (device.update, device.score, device.score):
        call()
    assert device.moves == [*(["sleep"] if shared else []), "update", *["free", "score"] * 2]


def test_phases_never_overlap() -> None:
    """`Device` checks the order. Only generation after an update without a sync is rejected."""
    for calls in itertools.product(["run", "update", "save", "publish"], repeat=5):
        device = Device()
        device.publish()
        stale = False
        for call in calls:
            if call == "run" and stale:
                with pytest.raises(AssertionError, match="without weights"):
                    device.run()
                break
            getattr(device, call)()
            stale = call == "update" or (stale and call != "publish")


@pytest.mark.parametrize("call", ["update", "save"])
def test_failed_sleep_is_repeated_before_trainers_load(call: str) -> None:
    device = Device()
    device.publish()
    device.run()
    device.sleep_error = WorkerDiedError("engine 0 died")
    with pytest.raises(WorkerDiedError):
        getattr(device, call)()
    assert "params" not in device.of_trainer
    getattr(device, call)()  # the fake asserts that the engine is asleep


@pytest.mark.parametrize("phase", list(Phase))
def test_interrupted_phase_is_entered_again(phase: Phase) -> None:
    """Example: an engine restarts, receives weights and regenerates lost responses."""
    device = Device()
    device.publish()
    device.run()
    phases = device.stages.phases
    assert phases is not None
    phases.enter(phase)
    device.of_trainer = {"params"} if phase is Phase.SYNC else device.of_trainer
    with phases.interrupted():
        phases.make_room()
        assert not device.of_trainer
        device.publish()
        device.run()
    assert device.of_engine == {Phase.GENERATE: {"weights", "kv_cache"}, Phase.SYNC: {"weights"}}.get(phase, set())
    device.run() if phase is Phase.KEEP else device.update()


@pytest.mark.parametrize("part", ["params", "grads", "optimizer"])
def test_shares_device_depends_on_placement_and_offload(part: str) -> None:
    config = Config()
    assert not shares_device(config.cluster, config.actor.offload, cuda=False)
    assert shares_device(config.cluster, config.actor.offload, cuda=True)
    setattr(config.actor.offload, part, True)
    assert shares_device(config.cluster, config.actor.offload, cuda=False)
    config.cluster.placement = "disaggregated"
    assert not shares_device(config.cluster, config.actor.offload, cuda=True)
