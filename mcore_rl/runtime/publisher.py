"""Coordinates weight syncs: the driver moves no bytes, it says when, and counts what arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import ray
import torch.distributed as dist

from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import RECOMPUTE
from mcore_rl.errors import WeightSyncError, WorkerDiedError
from mcore_rl.ports import Publisher
from mcore_rl.runtime.roles.engine_pool import EnginePool
from mcore_rl.runtime.roles.trainer import TrainerGroup
from mcore_rl.weights.connection import Connection, check_plan
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.link import Meeting, open_store
from mcore_rl.weights.transports.topology import Topology
from mcore_rl.weights.verify import require_equal

MIB = 2**20
T = TypeVar("T")


@dataclass
class SlicePublisher:
    """Publishes own slices: each engine rank gets what it needs, from trainer ranks that have it.

    Both sides go through the plan by themselves, converting, sending and loading at the same time; the driver calls
    each process once. `store` is where they met: it lives as long as the run.
    """

    trainers: TrainerGroup
    engines: EnginePool
    plan: SyncPlan
    store: dist.TCPStore
    address: str
    """Of the store."""
    timeout_seconds: float
    recompute: bool = False
    """Whether requests that run compute what they have of the KV cache anew."""
    version: int = field(default=0, init=False)
    _generation: int = field(default=0, init=False)
    """Of the group in which all have met; 0: none."""
    _broken: bool = field(default=True, init=False)
    """Whether they have to meet anew."""

    @classmethod
    def connect(cls, trainers: TrainerGroup, engines: EnginePool, config: Config) -> SlicePublisher:
        """Plans the sync and brings all processes together. From then on, engines that are lost when no other is left
        get their weights from here.

        Raises: ConfigError.
        """
        plan = _plan(trainers, engines, config)
        check_plan(plan)
        address = ray.util.get_node_ip_address()
        seconds = config.cluster.collective_timeout_seconds
        recompute = config.rollout.swap == RECOMPUTE
        publisher = cls(trainers, engines, plan, open_store(address), address, seconds, recompute)
        publisher._meet()
        return publisher

    def publish(self, version: int) -> int:
        """Hands every tensor to every engine; returns `version` when all have acknowledged everything. An engine that
        is lost meanwhile, or was before, starts again, and gets them with all others; what it holds then is compared.

        Raises: WeightSyncError when other bytes arrived than were sent.
        """

        def publish() -> None:
            if self.engines.settle() or self._broken:
                self._meet()
            self._send(version)

        self._insist(publish)
        self.version = self.engines.version = version
        if self.engines.num_without_weights:
            self.verify()
            self.engines.supplied()
        return version

    def verify(self) -> int:
        """Compares what every engine rank computes with to what the trainer ranks hold; returns the number of tensors
        compared. An engine that holds others is started again, as often as the pool does so.

        Raises: WeightSyncError listing the tensors that differ.
        """

        def compare() -> WeightSyncError | None:
            if self._broken:  # an engine was lost in the comparison before
                self.publish(self.version)
            sending = self.trainers.begin("send_digests")
            results = self.trainers.watch.get(self.engines.send("compare_weights") + sending.references)
            for engine, ranks in zip(self.engines.engines, results[: self.engines.num_engines], strict=True):
                try:
                    require_equal(ranks, engine.start.name)
                except WeightSyncError as error:
                    if not self.engines.max_restarts:
                        raise
                    self.engines.lose(engine, str(error))
                    return error
            return None

        while self._insist(compare) is not None:
            self.publish(self.version)
        return self.plan.num_tensors * self.engines.num_engines

    def _insist(self, call: Callable[[], T]) -> T:
        def marked() -> T:
            try:
                return call()
            except WorkerDiedError:
                self._broken = True
                raise

        return self.engines.insist(marked)

    def _meet(self) -> None:
        """Makes windows, maps them everywhere and removes their names at once, so that no crash can leave them behind.
        No earlier group has the name of this one."""
        trainers, watch = self.trainers, self.trainers.watch
        self._generation += 1
        try:
            made = trainers.on_every_rank("make_windows", [(ray.put(self.plan),)] * len(trainers.handles))
            segments = {number: name for of_rank in made for number, name in of_rank.items()}
            meeting = Meeting(self.address, self.store.port, self._generation)
            connection = ray.put(Connection(self.plan, meeting, segments, self.timeout_seconds))
            ranks = trainers.begin("connect_weights", [(connection,)] * len(trainers.handles))
            watch.get(
                ranks.references
                + [engine.connect.remote(connection, number) for number, engine in enumerate(self.engines.handles)]
            )
        finally:
            # Not passed on by one of them: its other call may still be waiting for a rank to connect.
            watch.get([handle.unlink_windows.remote() for handle in trainers.handles])
        self._broken = False

    def _send(self, version: int) -> None:
        sending = self.trainers.begin("send_weights")
        received = self.engines.send("receive_update", version, self.recompute)
        results = self.trainers.watch.get(received + sending.references)
        acknowledged = [num_bytes for of_engine in results[: self.engines.num_engines] for num_bytes in of_engine]
        sent = np.sum(sending.results(results[self.engines.num_engines :]), axis=0)
        for number, window in enumerate(self.plan.topology.windows):
            for reader in window.readers:
                if acknowledged[reader] != sent[number]:
                    name = self.plan.topology.name(self.plan.topology.member(reader))
                    raise WeightSyncError(f"{name} acknowledged {acknowledged[reader]} of {sent[number]} bytes")


def _plan(trainers: TrainerGroup, engines: EnginePool, config: Config) -> SyncPlan:
    watch, layout = trainers.watch, EngineLayout(config.rollout.tp, expert_parallel=config.rollout.expert_parallel)
    of_trainers = trainers.on_every_rank("endpoint")
    of_engines = engines.endpoints()
    topology = Topology(tuple(of_trainers), tuple(of_engines), layout.num_ranks, config.weights.transport)
    bucket_bytes = int(config.weights.bucket_mib * MIB)
    planned = trainers.handles[0].sync_plan.remote(layout, topology, bucket_bytes, config.weights.num_buckets)
    plan: SyncPlan = watch.get([planned])[0]
    return plan


if TYPE_CHECKING:
    _port: type[Publisher] = SlicePublisher
