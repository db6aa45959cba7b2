"""Coordinates weight syncs: the driver moves no bytes, it says when, and counts what arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
import torch.distributed as dist

from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import RECOMPUTE
from mcore_rl.errors import WeightSyncError, WorkerDiedError
from mcore_rl.ports import Publisher
from mcore_rl.runtime.engines.fleet import Fleet
from mcore_rl.runtime.roles.trainer import TrainerGroup
from mcore_rl.weights.connection import Connection, check_plan
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.link import Rendezvous, open_store
from mcore_rl.weights.transports.topology import Topology
from mcore_rl.weights.verify import require_equal

MIB = 2**20
T = TypeVar("T")


@dataclass
class SlicePublisher:
    """Publishes own slices: each engine rank gets what it needs, from trainer ranks that have it.

    Both sides go through the plan by themselves, converting, sending and loading at the same time; the driver calls
    each process once. `plan` is that of all engines. `store` is where they met: it lives as long as the run.
    """

    trainers: TrainerGroup
    engines: Fleet
    plan: SyncPlan
    store: dist.TCPStore
    address: str
    """Of the store."""
    timeout_seconds: float
    recompute: bool = False
    """Whether requests that run compute what they have of the KV cache anew."""
    version: int = field(default=0, init=False)
    _generation: int = field(default=0, init=False)
    """Of the group in which they have met; 0: none."""
    _members: list[int] = field(default_factory=list, init=False)
    """The engines in it, by index: those that were up."""
    _met: SyncPlan = field(init=False)
    """Of these engines."""
    _broken: bool = field(default=True, init=False)
    """Whether they have to meet anew."""

    @staticmethod
    def connect(trainers: TrainerGroup, engines: Fleet, config: Config) -> SlicePublisher:
        """Plans the sync and brings all processes together. From then on, engines that are lost when no other is left
        get their weights from here.

        Raises: ConfigError.
        """
        plan = _plan(trainers, engines, config)
        check_plan(plan)
        address = ray.util.get_node_ip_address()
        seconds = trainers.watch.dependent_seconds
        recompute = config.rollout.swap == RECOMPUTE
        publisher = SlicePublisher(trainers, engines, plan, open_store(address), address, seconds, recompute)
        publisher._meet(range(engines.num_engines))
        return publisher

    def publish(self, version: int) -> int:
        """Hands every tensor to every engine that is up; returns `version` when these have acknowledged everything. One
        that is lost meanwhile, or was before, starts again, and gets the first version that comes when it is up; what
        it holds then is compared.

        Raises: WeightSyncError when other bytes arrived than were sent.
        """

        def publish() -> None:
            members = self.engines.up()
            if self._broken or members != self._members or self.engines.lack_weights(members):
                self._meet(members)
            self._send(version)

        self._insist(publish)
        self.version = self.engines.version = version
        if self.engines.lack_weights(self._members):
            self.verify()
            self.engines.mark_supplied(self._members)
        return version

    def verify(self) -> int:
        """Compares what every engine rank computes with, of the engines that the last version was sent to, to what the
        trainer ranks hold; returns the number of tensors compared. An engine that holds others is started again, as
        often as the pool does so.

        Raises: WeightSyncError listing the tensors that differ.
        """

        def compare() -> WeightSyncError | None:
            if self._broken:  # an engine was lost in the comparison before
                self.publish(self.version)
            sending = self.trainers.begin("send_digests")
            results = self.trainers.watch.get(self._ask("compare_weights") + sending.references)
            engines = [self.engines.engines[member] for member in self._members]
            for engine, ranks in zip(engines, results[: len(engines)], strict=True):
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
        return self.plan.num_tensors * len(self._members)

    def _insist(self, call: Callable[[], T]) -> T:
        def marked() -> T:
            try:
                return call()
            except WorkerDiedError:
                self._broken = True
                raise

        return self.engines.retry_on_engine_loss(marked)

    def _meet(self, members: Sequence[int]) -> None:
        """Makes windows, maps them everywhere and removes their names at once, so that no crash can leave them behind.
        No earlier group has the name of this one."""
        trainers, watch = self.trainers, self.trainers.watch
        self._generation += 1
        self._members, self._met = list(members), replace(self.plan, topology=self.plan.topology.for_engines(members))
        try:
            made = trainers.on_every_rank("create_buffers", [(ray.put(self._met),)] * len(trainers.handles))
            segments = {number: name for of_rank in made for number, name in of_rank.items()}
            rendezvous = Rendezvous(self.address, self.store.port, self._generation)
            connection = ray.put(Connection(self._met, rendezvous, segments, self.timeout_seconds))
            ranks = trainers.begin("connect_weights", [(connection,)] * len(trainers.handles))
            engines = [handle.connect.remote(connection, place) for place, handle in enumerate(self._handles)]
            watch.get(ranks.references + engines)
        finally:
            # Not passed on by one of them: its other call may still be waiting for a rank to connect.
            watch.get([handle.unlink_buffers.remote() for handle in trainers.handles])
        self._broken = False

    @property
    def _handles(self) -> list[Any]:
        return [self.engines.engines[member].handle for member in self._members]

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """References of the results of a method on every member."""
        return [getattr(handle, method).remote(*arguments) for handle in self._handles]

    def _send(self, version: int) -> None:
        sending = self.trainers.begin("send_weights")
        received = self._ask("receive_update", version, self.recompute)
        results = self.trainers.watch.get(received + sending.references)
        acknowledged = [num_bytes for of_engine in results[: len(received)] for num_bytes in of_engine]
        sent, topology = np.sum(sending.results(results[len(received) :]), axis=0), self._met.topology
        for number, buffer in enumerate(topology.buffers):
            for reader in buffer.readers:
                if acknowledged[reader] != sent[number]:
                    name = topology.name(topology.member(reader))
                    raise WeightSyncError(f"{name} acknowledged {acknowledged[reader]} of {sent[number]} bytes")


def _plan(trainers: TrainerGroup, engines: Fleet, config: Config) -> SyncPlan:
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
