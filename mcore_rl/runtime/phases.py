"""Who holds the device when trainer ranks and engines share it: the moves between the phases of a step, in their order.

    phase      trainer ranks hold            engines hold
    TRAIN      what the call loads           nothing; their weights lie in host memory or are discarded
    SYNC       parameters                    weights
    GENERATE   nothing that is offloaded     weights and KV cache

    generate -> engines sleep -> recompute_logp, update -> gradients and optimizer leave -> weights wake -> sync
             -> parameters leave -> KV cache wakes -> generate

Ranks load what a call needs when it comes (megatron.offload); here is what must have left before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from mcore_rl.config.rules.defaults import uses_cuda
from mcore_rl.config.schema import Config
from mcore_rl.types import Metric, Total

ALL_STATE = ("params", "grads", "optimizer")
NOT_SYNCED = ("grads", "optimizer")


class Phase(Enum):
    """REPLACE is TRAIN where a sync follows, so that engines need not keep their weights; KEEP is TRAIN where they
    must."""

    REPLACE = "replace"
    KEEP = "keep"
    SYNC = "sync"
    GENERATE = "generate"


class Trainers(Protocol):
    def offload(self, parts: tuple[str, ...]) -> int:
        """Sends `parts` to host memory where the configuration says so; returns the bytes away, of all ranks."""


class Engines(Protocol):
    def sleep(self, keep_weights: bool) -> int:
        """Returns the bytes that all engines gave up."""

    def wake_up(self, part: str) -> None:
        """Gives back "weights" or "kv_cache"."""


def shares_device(config: Config) -> bool:
    """Whether engines and trainer ranks take turns: colocated on GPUs, or wherever something is offloaded."""
    offload = config.actor.offload
    if config.cluster.placement != "colocated":
        return False
    return uses_cuda(config.cluster) or offload.params or offload.grads or offload.optimizer


@dataclass
class Phases:
    """Where the device's memory is, and how it gets to the next phase.

    Engines begin asleep without weights (`launch` puts them so). `record` takes what moved as metrics, `span` times
    the moves.
    """

    trainers: Trainers
    engines: Engines
    record: Callable[[dict[str, Metric]], None]
    span: Callable[[str], AbstractContextManager[None]]
    _weights: str = field(default="discarded", init=False)
    """awake | kept (in host memory) | discarded"""
    _kv_cache_awake: bool = field(default=False, init=False)
    _phase: Phase | None = field(default=None, init=False)

    def enter(self, phase: Phase) -> None:
        """Moves what must move before `phase`; nothing when it is there already."""
        if phase is self._phase:
            return
        self._phase = phase
        if phase in (Phase.REPLACE, Phase.KEEP):
            self._put_to_sleep(keep_weights=phase is Phase.KEEP)
            if phase is Phase.REPLACE:
                self._weights = "discarded"  # or kept, and about to be stale
        elif phase is Phase.SYNC:
            if self._kv_cache_awake:
                self._put_to_sleep(keep_weights=True)
            self._offload(NOT_SYNCED)
            self._wake_weights()
        else:
            # Discarded ones come back as garbage, which only a sync mends.
            assert self._weights != "discarded", "engines were to generate without weights"
            away = self._offload(ALL_STATE)
            self.record({"memory/offloaded_bytes": Total(away)})
            self._wake_weights()
            self._wake_kv_cache()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Free the device of all trainer state, for engines that start again in the block. Afterwards the phase is the
        same as before, whichever the block has entered."""
        before = self._phase
        self._offload(ALL_STATE)
        yield
        if before is not None:
            self.enter(before)

    def _put_to_sleep(self, *, keep_weights: bool) -> None:
        if self._weights != "awake":
            return
        with self.span("engine_sleep"):
            released = self.engines.sleep(keep_weights)
        self._weights, self._kv_cache_awake = "kept" if keep_weights else "discarded", False
        self.record({"memory/engine_released_bytes": Total(released)})

    def _wake_weights(self) -> None:
        if self._weights != "awake":
            with self.span("engine_wake_up"):
                self.engines.wake_up("weights")
            self._weights = "awake"

    def _wake_kv_cache(self) -> None:
        if not self._kv_cache_awake:
            with self.span("engine_wake_up"):
                self.engines.wake_up("kv_cache")
            self._kv_cache_awake = True

    def _offload(self, parts: tuple[str, ...]) -> int:
        with self.span("offload"):
            return self.trainers.offload(parts)
