"""Coordination of weight syncs: the driver moves no tensors; it starts syncs and compares the acknowledged bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
import ray
import torch.distributed as dist

from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import RECOMPUTE
from mcore_rl.errors import WeightSyncError, WorkerDiedError
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.runtime.phases import Phase, Stages, staged
from mcore_rl.runtime.roles.trainer import TrainerGroup, TrainerProcess
from mcore_rl.types import Mean, Metric, Total
from mcore_rl.weights.connection import Connection, check_plan
from mcore_rl.weights.delta.copies import FrameBytes
from mcore_rl.weights.engine_config import engine_layout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.arrival import Rendezvous, announce_loss
from mcore_rl.weights.transports.files.run_files import RunFiles
from mcore_rl.weights.transports.link import open_store
from mcore_rl.weights.transports.topology import Topology
from mcore_rl.weights.verify import Comparison, require_equal

MIB = 2**20
T = TypeVar("T")


@dataclass
class SlicePublisher:
    """Publishes slices: each engine rank receives the slices that it needs from trainer ranks that have them.

    Trainer and engine processes follow the plan without the driver, which calls each process once: they convert, send
    and load concurrently. `plan` includes all engines. `store` is the rendezvous store, which lives as long as the run.
    `files`: folder of the weights if weights.transport=files; engines then fetch an update before they pause for it.
    """

    trainers: TrainerGroup
    engines: Fleet
    plan: SyncPlan
    store: dist.TCPStore
    recompute: bool = False
    """True if running requests recompute their KV cache after an update."""
    record: Callable[[dict[str, Metric]], None] = lambda metrics: None
    """Receives the metrics of each sync."""
    files: RunFiles | None = None
    _generation: int = field(default=0, init=False)
    """Number of the current transfer group; 0: none."""
    _members: Sequence[FleetEngine] = field(default=(), init=False)
    """Engines in the group: all that were up when it was created."""
    _member_plan: SyncPlan = field(init=False)
    """The plan for the current members."""
    _broken: bool = field(default=True, init=False)
    """True if a new group is needed."""
    _warned: bool = field(default=False, init=False)
    """True after the note that weights.delta has no effect."""

    @property
    def stages(self) -> Stages:
        return self.trainers.stages

    @staticmethod
    def connect(
        trainers: TrainerGroup,
        engines: Fleet,
        config: Config,
        record: Callable[[dict[str, Metric]], None],
        files: RunFiles | None = None,
    ) -> SlicePublisher:
        """Plan the sync and connect all processes.

        Raises: ConfigError.
        """
        rollout, weights, watch = config.rollout, config.weights, trainers.watch
        layout = engine_layout(rollout)
        of_trainers, of_engines = trainers.call(TrainerProcess.endpoint).results(), engines.endpoints()
        topology = Topology(tuple(of_trainers), tuple(of_engines), layout.num_ranks, weights.transport, weights.delta)
        sizes = int(weights.bucket_mib * MIB), weights.num_buckets
        [plan] = watch.get([trainers.processes[0].call(TrainerProcess.sync_plan, layout, topology, *sizes)])
        # vLLM's kernels on GPUs may round scales up to powers of two and then round the codes again. Scales that are
        # already powers of two stay as they are.
        plan = replace(
            plan,
            quantization=rollout.quantization,
            quantization_group=rollout.quantization_group,
            power_of_two_scales=config.cluster.uses_cuda,
        )
        check_plan(plan)
        store = open_store(ray.util.get_node_ip_address())
        recompute = rollout.swap == RECOMPUTE
        publisher = SlicePublisher(trainers, engines, plan, store, recompute=recompute, record=record, files=files)
        publisher._connect(engines.engines, engines.engines)
        return publisher

    @staged("weight_sync", Phase.SYNC)
    def publish(self, version: int) -> int:
        """Send the weights to every engine that is up; returns `version` after they have acknowledged everything.
        Engines that hold the frozen weights (weights/frozen.py) receive all others. A restarted engine receives the
        first version after it is up, and its weights are compared then.

        Raises: WeightSyncError if an engine rank received another number of bytes than was sent.
        """
        return self._publish(version)

    def _publish(self, version: int) -> int:
        def publish() -> None:
            members = self.engines.up()
            first_round = self._supply_frozen(version, members)
            # A restarted engine is a new process, which has not joined the transfer group.
            if self._broken or members != self._members or _lack_weights(members):
                self._connect(members, members)
            self._send(version, first_round)
            if self.plan.topology.delta:
                self._record_delta()
            for engine in members:
                engine.holds_frozen = True

        self._retry(publish)
        self.engines.version = version
        if _lack_weights(self._members):
            self._verify()
        joined = self._join_gateways()
        self.engines.mark_supplied(joined)
        return version

    def _join_gateways(self) -> list[FleetEngine]:
        """Let new engines answer requests of their hosts' gateways, and return the members that are up. Not before the
        bytes and weights of restarted engines are compared: requests that wait arrive at once."""

        def join() -> list[FleetEngine]:
            members = [engine for engine in self._members if engine.starting is None]
            new = [engine for engine in members if not engine.has_joined]
            self.trainers.watch.get([engine.process.call(EngineProcess.join_gateway) for engine in new])
            for engine in new:
                engine.has_joined = True
            return members

        return self._retry(join)

    def supply(self) -> None:
        """Send the current weights to engines that were restarted during generation, which continues."""
        self.publish(self.engines.version)
        with self.stages.stage(phase=Phase.GENERATE):  # switches a shared device back
            pass

    def supply_restarted(self) -> None:
        """Restart lost engines, and supply restarted engines as soon as they are up.

        Raises: as `publish`; WorkerDiedError if an engine is lost after rollout.max_engine_restarts restarts.
        """
        self.engines.reap_failed()
        if _lack_weights(self.engines.engines) and _lack_weights(self.engines.up()):
            self.supply()

    def _supply_frozen(self, version: int, members: Sequence[FleetEngine]) -> int:
        """Return the first round of an update of all `members`. If only some lack frozen weights, these first receive a
        whole update in a transfer group of their own, so that the others need not receive them again. The metrics of
        deltas leave it out: they describe the sync of all engines."""
        first_round = self.plan.first_trained_round
        lacking = [engine for engine in members if not engine.holds_frozen]
        if not first_round or not lacking:
            return first_round
        if len(lacking) == len(members):
            return 0
        self._connect(lacking, members)
        self._send(version, 0)
        for engine in lacking:
            engine.holds_frozen = True
        return first_round

    @staged("verify", Phase.SYNC)
    def verify(self) -> int:
        """Compare the tensors of all engine ranks that received the last version with the trainer ranks' tensors;
        returns the number of tensors compared. An engine with different weights is restarted while restarts are
        left.

        Raises: WeightSyncError listing the tensors that differ.
        """
        return self._verify()

    def _verify(self) -> int:
        def compare() -> WeightSyncError | None:
            if self._broken:  # an engine was lost in the previous comparison
                self._publish(self.engines.version)
            members = self._members
            sending = self.trainers.call(TrainerProcess.send_digests)
            comparing = [engine.process.call(EngineProcess.compare_weights) for engine in members]
            # Both sides together: engines wait for the digests of the trainer ranks.
            results = self.trainers.watch.get([*comparing, *sending.references])
            by_engine = cast("list[list[Comparison]]", results[: len(members)])
            for engine, ranks in zip(members, by_engine, strict=True):
                try:
                    require_equal(ranks, engine.name)
                except WeightSyncError as error:
                    if not self.engines.max_restarts:
                        raise
                    self.engines.lose(engine, str(error), keeps_tokens=False)
                    return error
            return None

        while self._retry(compare) is not None:
            self._publish(self.engines.version)
        return self.plan.num_tensors * len(self._members)

    def _retry(self, call: Callable[[], T]) -> T:
        def marked() -> T:
            try:
                return call()
            except WorkerDiedError as error:
                # A transfer group cannot continue without one of its members. Those that wait for it between GPUs
                # would notice its loss only after their timeout.
                self._broken = True
                announce_loss(self.store, self._generation, str(error))
                raise

        return self.engines.retry_on_engine_loss(marked)

    def _connect(self, members: Sequence[FleetEngine], up: Sequence[FleetEngine]) -> None:
        """Create a transfer group of trainer ranks and `members`, some of the engines that are `up`: create staging
        buffers, map them in all processes, and remove their names at once, so that no crash leaves them behind. The
        buffers of the earlier group are freed before."""
        trainers, watch = self.trainers, self.trainers.watch
        if self._generation:
            self._disconnect(up)
        # A group that failed may have left keys in the store; the number keeps them apart.
        self._generation += 1
        self._members = list(members)
        topology = self.plan.topology.for_engines([engine.number for engine in members])
        self._member_plan = replace(self.plan, topology=topology)
        try:
            made = trainers.call(TrainerProcess.create_buffers, ray.put(self._member_plan)).results()
            buffers = {number: name for of_rank in made for number, name in of_rank.items()}
            rendezvous = Rendezvous(self.store.host, self.store.port, self._generation)
            folder = None if self.files is None else self.files.begin_connection(self._generation)
            settings = rendezvous, buffers, watch.dependent_seconds, folder
            connection = ray.put(Connection(self._member_plan, *settings))
            ranks = trainers.call(TrainerProcess.connect_weights, connection)
            engines = [
                engine.process.call(EngineProcess.connect, connection, place) for place, engine in enumerate(members)
            ]
            watch.get([*ranks.references, *engines])
        finally:
            # Each rank is called directly: a rank that forwards calls may still wait in `connect_weights`.
            watch.get([rank.call(TrainerProcess.unlink_buffers) for rank in trainers.processes])
        self._broken = False

    def _disconnect(self, engines: Sequence[FleetEngine]) -> None:
        """End the current transfer group, also one that failed half-way. Afterwards no process maps a staging buffer of
        another: `engines` are all engines that are alive, and a process that died has no mapping."""
        ranks = self.trainers.call(TrainerProcess.disconnect_weights)
        left = [engine.process.call(EngineProcess.disconnect) for engine in engines]
        self.trainers.watch.get([*ranks.references, *left])

    def _send(self, version: int, first_round: int) -> None:
        sending = self.trainers.call(TrainerProcess.send_weights, first_round)
        if self.files is not None:
            fetching = [engine.process.call(EngineProcess.fetch_update, first_round) for engine in self._members]
            self.trainers.watch.get([*fetching, *sending.references])
        receiving = [
            engine.process.call(EngineProcess.receive_update, version, self.recompute, first_round)
            for engine in self._members
        ]
        # Wait for both sides together, so that a failure on either side ends the wait.
        results = self.trainers.watch.get([*receiving, *sending.references])
        by_engine, by_trainer = cast("list[list[int]]", results[: len(receiving)]), results[len(receiving) :]
        acknowledged = [num_bytes for of_engine in by_engine for num_bytes in of_engine]
        sent = np.sum(sending.in_order(cast("list[np.ndarray]", by_trainer)), axis=0)
        topology = self._member_plan.topology
        for number, buffer in enumerate(topology.buffers):
            for reader in buffer.readers:
                if acknowledged[reader] != sent[number]:
                    name = topology.name(topology.member(reader))
                    raise WeightSyncError(f"{name} acknowledged {acknowledged[reader]} of {sent[number]} bytes")

    def _record_delta(self) -> None:
        """Record the bytes of the last sync between hosts, and their share of the weights that they stand for."""
        total = sum(self.trainers.call(TrainerProcess.delta_bytes).results(), FrameBytes())
        if total.content:
            self.record({
                "weights/delta_bytes": Total(total.sent),
                "weights/delta_share": Mean(total.sent, total.content),
            })  # fmt: skip
        elif not self._warned:
            self._warned = True
            self.engines.note("weights.delta=true has no effect: all engine ranks receive weights from their own host")


def _lack_weights(engines: Sequence[FleetEngine]) -> bool:
    """Return whether any of these engines has no weights yet."""
    return not all(engine.has_weights for engine in engines)
