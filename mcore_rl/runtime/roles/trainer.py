"""Ranks of the policy: their process, and their group, which is the trainer's Actor."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray

from mcore_rl.config.schema import Config
from mcore_rl.types import (
    LogpGap,
    Metric,
    RankShares,
    TokenColumn,
    TrajectoryBuffers,
)

if TYPE_CHECKING:
    from mcore_rl.megatron.step.rank_batch import RankBatch
    from mcore_rl.weights.connection import Connection
    from mcore_rl.weights.slices.engine_layout import EngineLayout
    from mcore_rl.weights.sync_plan import SyncPlan
    from mcore_rl.weights.transports.topology import Endpoint, Topology
from dataclasses import dataclass

from mcore_rl.runtime.delivery import DriverChunk
from mcore_rl.runtime.roles.base import Held, RankGroup, TrainedRankProcess, batch_keys, joined, with_metrics
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import Batch, BatchHandle, BuffersRef, TokenRefs, merge_metrics
from mcore_rl.weights.transports.hosts import this_host


@ray.remote(concurrency_groups={"watch": 2, "pass_on": 1, "save": 1}, max_restarts=0)
@marks_errors
class TrainerProcess(TrainedRankProcess):
    """One rank of the actor (policy)."""

    def __init__(self, name: str, logs: str | None = None, peers: int | None = None) -> None:
        super().__init__(name, logs, peers)
        self._held: Held[RankBatch] = Held()

    def setup(self, config: Config, rank: int, world_size: int, init_method: str) -> None:
        from mcore_rl.megatron.roles.actor import MegatronActor

        with self.spans.span("setup"):
            self.actor = self.role = MegatronActor(config, rank, world_size, init_method)
        self.actor.memory.span = self.spans.span

    def compare(self, shares: RankShares, *chunks: TrajectoryBuffers) -> dict[str, Metric]:
        return self.actor.compare(shares.by_update()[0], chunks)

    def compare_logp(self, shares: RankShares, *chunks: TrajectoryBuffers) -> list[LogpGap]:
        with self.spans.span("compare logp"):
            return self.actor.compare_logp(shares.by_update(), chunks)

    def recompute_logp(self, key: int, shares: RankShares, *chunks: TrajectoryBuffers) -> dict[str, Metric]:
        """Of a batch that is kept, under `key`, for the calls that follow up to its update. Its trajectories lie in the
        object store until then."""
        with self.spans.span("recompute logp"):
            batch, metrics = self.actor.recompute_logp(shares.by_update(), list(chunks))
        self._held.keep(key, batch)
        return metrics

    def replace_shares(self, key: int, shares: RankShares) -> None:
        """Other numbers of the same samples."""
        self._held.keep(key, replace(self._held.of(key), shares=shares.by_update()))

    def reference_logp(self, key: int) -> None:
        with self.spans.span("reference logp"):
            self._held.keep(key, self.actor.reference_logp(self._held.of(key)))

    def kl_penalties(self, key: int, coefficient: float) -> tuple[dict[str, Metric], dict[int, float]]:
        """Metrics, and on ranks of the last stage what is taken off the reward of each sample of the share."""
        with self.spans.span("kl penalties"):
            batch, metrics = self.actor.kl_penalties(self._held.of(key), coefficient)
        self._held.keep(key, batch)
        return metrics, {sample: float(penalty.sum(dtype=np.float64)) for sample, penalty in batch.penalties.items()}

    def refresh_reference(self) -> None:
        with self.spans.span("refresh reference"):
            self.actor.refresh_reference()

    def offload(self, parts: tuple[str, ...]) -> int:
        away = super().offload(parts)
        if self.actor.reference is not None and "params" in parts:  # a checkpoint may have brought it back
            self.actor.reference.memory.offload()
        return away

    @ray.method(num_returns=2)
    def estimate(self, key: int, *values: TokenColumn) -> tuple[dict[str, Metric], TokenColumn]:
        """Metrics, and the returns of the share, on ranks of the last stage."""
        with self.spans.span("estimate"):
            by_sample = joined(values) if self.actor.estimator.needs.values else None
            batch, metrics, returns = self.actor.estimate(self._held.of(key), by_sample)
        self._held.keep(key, batch)
        return metrics, TokenColumn.of(returns)

    def update(self, key: int, *brought: Any) -> list[dict[str, Metric]]:
        """Trains on the batch and lets it go; one that is brought with the call (as `recompute_logp` takes it) goes
        through that first. Metrics of that, and of every update."""
        reports = [self.recompute_logp(key, *brought)] if brought else []
        batch = self._held.take(key)
        for index in range(len(batch.shares)):
            with self.spans.span("update"):
                reports.append(self.actor.update(batch, index))
        self.actor.gather_parameters()  # weights are read rank by rank from here on
        return reports

    def endpoint(self) -> Endpoint:
        """From where this rank sends weights."""
        from mcore_rl.weights.transports.cuda_ipc import device_uuid
        from mcore_rl.weights.transports.topology import Endpoint

        return Endpoint(this_host(), ray.util.get_node_ip_address(), device_uuid())

    def sync_plan(self, engine: EngineLayout, topology: Topology, bucket_bytes: int, num_slots: int) -> SyncPlan:
        """The same on every rank."""
        return self.actor.sync_plan(engine, topology, bucket_bytes, num_slots)

    def create_buffers(self, plan: SyncPlan) -> dict[int, str]:
        """Create the staging buffers that this rank owns. Returns their names by buffer number."""
        from mcore_rl.weights.connection import TrainerSetup

        self._setup = TrainerSetup(plan, self.actor.rank)
        return self._setup.create_buffers()

    def connect_weights(self, connection: Connection) -> None:
        """Collective over all processes of the sync."""
        with self.spans.span("connect weights"):
            self._sender = self._setup.connect(connection)

    @ray.method(concurrency_group="watch")
    def unlink_buffers(self) -> None:
        """Remove the names of the staging buffers, even while this rank waits in `connect_weights`."""
        self._setup.unlink()

    def send_weights(self) -> npt.NDArray[np.int64]:
        """Send one update. Returns the bytes that this rank sent to each staging buffer."""
        return self._sender.send(self.actor.tensors(), self.spans.span)

    def send_digests(self) -> None:
        with self.spans.span("digest"):
            self._sender.send_digests(self.actor.tensors())

    def export_hf(self, directory: str, source: str) -> None:
        """Collective over all ranks."""
        from mcore_rl.megatron.roles.export import export_hf

        with self.spans.span("export"):
            export_hf(self.actor, directory, source)

    def export_adapter(self, directory: str, source: str) -> None:
        """Collective over all ranks."""
        from mcore_rl.megatron.roles.export_adapter import export_adapter

        with self.spans.span("export"):
            export_adapter(self.actor, directory, source)


@dataclass
class TrainerGroup(RankGroup):
    """All ranks of the policy: a ports.Actor."""

    def recompute_logp(self, batch: Batch) -> BatchHandle:
        """Log-probabilities of the current policy, which stay on the ranks with the batch. The only update of a batch
        finds them itself: nothing is sent then."""
        handle = BatchHandle(batch, next(batch_keys))
        return handle if len(batch.updates) == 1 else self._sent(handle)

    def reference_logp(self, handle: BatchHandle) -> BatchHandle:
        """Log-probabilities of the reference, which stay on the ranks."""
        sent = self._sent(handle)
        self.on_every_rank("reference_logp", [(sent.key,)] * len(self.handles))
        return sent

    def compare(self, batch: Batch) -> dict[str, Metric]:
        """How far the policy's log-probabilities are from those that came with the batch."""
        return merge_metrics(self.on_every_rank("compare", self.sent_with(batch)))

    def compare_logp(self, batch: Batch) -> list[LogpGap]:
        """Differences to the log-probabilities that came with the batch, update by update."""
        by_rank = self.on_every_rank("compare_logp", self.sent_with(batch))
        return [functools.reduce(operator.add, parts) for parts in zip(*by_rank, strict=True)]

    def kl_penalties(self, handle: BatchHandle, coefficient: float) -> tuple[BatchHandle, np.ndarray]:
        """What the KL takes off the rewards, of a batch from `reference_logp`. Token by token it stays on the ranks for
        `estimate`; here the sums over responses. Shapes: float32 [B]."""
        results = self.on_every_rank("kl_penalties", [(handle.key, coefficient)] * len(self.handles))
        sums = np.zeros(len(handle.batch), np.float32)
        for speaker in self.ranks.speakers:
            for sample, total in results[speaker][1].items():
                sums[sample] = total
        return with_metrics(handle, [metrics for metrics, _ in results]), sums

    def with_advantages(self, handle: BatchHandle, advantages: np.ndarray) -> BatchHandle:
        """The batch with other advantages; what the ranks have found of its tokens stays."""
        other = replace(handle, batch=replace(handle.batch, advantages=np.asarray(advantages, np.float32)))
        if other.is_sent:
            self.on_every_rank("replace_shares", [(other.key, shares) for shares in self.shares_of(other.batch)])
        return other

    def refresh_reference(self) -> None:
        """The reference takes the policy's present weights."""
        self.on_every_rank("refresh_reference")

    def estimate(self, handle: BatchHandle, values: TokenRefs | None) -> tuple[BatchHandle, TokenRefs]:
        """Advantages token by token, which stay on the ranks for the batch's updates; `values` are a critic's. Returns
        the returns too."""
        sent, size = self._sent(handle), len(self.ranks.speakers)
        columns = [values.overlapping(dp, size) if values else () for dp in self.ranks.dp_rank_of]
        calls = [
            rank.estimate.remote(sent.key, *rank_values)
            for rank, rank_values in zip(self.handles, columns, strict=True)
        ]
        metrics = self.watch.get([metrics_ref for metrics_ref, _ in calls])
        returns = TokenRefs(tuple(calls[speaker][1] for speaker in self.ranks.speakers), sent.key)
        return with_metrics(sent, metrics), returns

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        """One optimizer step per entry of the batch's updates, after which the ranks let it go. A batch that nothing
        else has sent comes with the call.

        Raises: NonFiniteError before a non-finite step.
        """
        brought = [()] * len(self.handles) if handle.is_sent else self.sent_with(handle.batch)
        reports = self.on_every_rank("update", [(handle.key, *rank_arguments) for rank_arguments in brought])
        return merge_metrics([report for reports_of_rank in reports for report in reports_of_rank])

    def _sent(self, handle: BatchHandle) -> BatchHandle:
        """The batch on the ranks, with the policy's log-probabilities."""
        if handle.is_sent:
            return handle
        arguments = [(handle.key, *rank_arguments) for rank_arguments in self.sent_with(handle.batch)]
        return with_metrics(replace(handle, is_sent=True), self.on_every_rank("recompute_logp", arguments))

    def export_hf(self, directory: str, source: str) -> None:
        """Writes the weights as an HF directory; collective over all ranks."""
        self.on_every_rank("export_hf", [(directory, source)] * len(self.handles))

    def export_adapter(self, directory: str, source: str) -> None:
        """Writes the adapters of a LoRA run in PEFT's format; collective over all ranks."""
        self.on_every_rank("export_adapter", [(directory, source)] * len(self.handles))

    @staticmethod
    def store(buffers: TrajectoryBuffers) -> BuffersRef:
        """For Batch.chunks: trajectories that were made on the driver."""
        return BuffersRef(DriverChunk(buffers))
