"""Phases of a step in which trainer ranks or engines hold a shared device, and the moves between them.

    phase      trainer ranks hold            engines hold
    TRAIN      what the call loads           nothing; their weights lie in host memory or are discarded
    SYNC       parameters                    weights
    GENERATE   nothing that is offloaded     weights and KV cache

    generate -> engines sleep -> recompute_logp, update -> gradients and optimizer leave -> weights wake -> sync
             -> parameters leave -> KV cache wakes -> generate

Ranks load the state that a call needs when it arrives (megatron.offload); this module frees memory before that.
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
    """REPLACE is TRAIN before a sync, where engines need not keep their weights; KEEP is TRAIN without a sync, where
    they must."""

    REPLACE = "replace"
    KEEP = "keep"
    SYNC = "sync"
    GENERATE = "generate"


class Trainers(Protocol):
    def offload(self, parts: tuple[str, ...]) -> int:
        """Move `parts` to host memory if the configuration says so; returns the bytes of all ranks that are there."""


class Engines(Protocol):
    def sleep(self, keep_weights: bool) -> int:
        """Free memory; returns the bytes freed by all engines."""

    def wake_up(self, part: str) -> None:
        """Take memory for "weights" or "kv_cache"."""


def shares_device(config: Config) -> bool:
    """Return whether engines and trainer ranks use the device in turns: colocated on GPUs, or with offloading."""
    offload = config.actor.offload
    if config.cluster.placement != "colocated":
        return False
    return uses_cuda(config.cluster) or offload.params or offload.grads or offload.optimizer


@dataclass
class Phases:
    """State of the device's memory, and the moves to the next phase.

    At first, engines sleep without weights (see `launch`). `record` takes metrics of the moves, `span` times them.
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
        """Make the moves that `phase` needs."""
        if phase is self._phase:
            return
        self._phase = phase
        if phase in (Phase.REPLACE, Phase.KEEP):
            self._put_to_sleep(keep_weights=phase is Phase.KEEP)
            if phase is Phase.REPLACE:
                self._weights = "discarded"  # or kept in host memory, but stale after the sync
        elif phase is Phase.SYNC:
            if self._kv_cache_awake:
                self._put_to_sleep(keep_weights=True)
            self._offload(NOT_SYNCED)
            self._wake_weights()
        else:
            # Discarded weights come back with undefined values until a sync.
            assert self._weights != "discarded", "engines would generate without weights"
            away = self._offload(ALL_STATE)
            self.record({"memory/offloaded_bytes": Total(away)})
            self._wake_weights()
            self._wake_kv_cache()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Free the device of all trainer state, for engines that start again in the block. Afterwards the phase is the
        same as before, whichever phase the block has entered."""
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
