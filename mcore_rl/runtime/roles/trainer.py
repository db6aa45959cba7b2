"""Process of a policy rank, and the group of all ranks, which implements ports.Actor."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import ray

from mcore_rl.runtime.calls import remote_method
from mcore_rl.runtime.delivery import DriverChunk
from mcore_rl.runtime.phases import Phase, staged
from mcore_rl.runtime.roles.base import HeldBatch, SetUpContext, TrainedRankProcess, joined
from mcore_rl.runtime.roles.groups import TrainedRankGroup, batch_keys, with_metrics
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import (
    Batch,
    BatchHandle,
    BuffersRef,
    DeviceMemory,
    LogpGap,
    Metric,
    RankShares,
    ScoreColumn,
    ScoreRefs,
    SequenceLogp,
    SequenceSums,
    TokenColumn,
    TokenRefs,
    TrajectoryBuffers,
    merge_metrics,
)
from mcore_rl.weights.transports.hosts import this_host

if TYPE_CHECKING:
    from mcore_rl.megatron.step.loss.rank_batch import RankBatch
    from mcore_rl.weights.connection import Connection, TrainerSetup
    from mcore_rl.weights.delta.copies import FrameBytes
    from mcore_rl.weights.send import WeightSender
    from mcore_rl.weights.slices.engine_layout import EngineLayout
    from mcore_rl.weights.sync_plan import SyncPlan
    from mcore_rl.weights.transports.shared_buffer import SharedNames
    from mcore_rl.weights.transports.topology import Endpoint, Topology


@marks_errors
class TrainerProcess(TrainedRankProcess):
    """One rank of the actor (policy)."""

    _sender: WeightSender
    """Sends weight updates; absent before the first connection."""
    _setup: TrainerSetup | None = None
    """The current connection with its staging buffers."""

    def __init__(self, name: str, logs: str | None = None, peers: int | None = None) -> None:
        super().__init__(name, logs, peers)
        self._held: HeldBatch[RankBatch] = HeldBatch()

    def _build(self, context: SetUpContext, rank: int, world_size: int, address: str) -> None:
        from mcore_rl.megatron.roles.actor import MegatronActor

        self.actor = self.role = MegatronActor(context.config, rank, world_size, address)
        self.actor.memory.span = self.spans.span

    def start_profile(self) -> None:
        """Record a profile until `write_profile`, with the spans of this process as ranges."""
        # Not at the top: torch may be imported only after the set-up has hidden other GPUs.
        from mcore_rl.runtime.rank_profile import RankProfile

        self._profile = RankProfile()
        self.spans.annotate = self._profile.annotate

    def write_profile(self, path: str) -> None:
        """Stop the profile and write it to files whose names begin with `path`."""
        self.spans.annotate = nullcontext
        self._profile.write(Path(path))
        del self._profile  # it holds the events of the step

    def compare(self, shares: RankShares, *chunks: TrajectoryBuffers) -> dict[str, Metric]:
        """Compare the policy's log-probabilities with the recorded ones, for the samples of the first update."""
        return self.actor.compare(shares.by_update()[0], chunks)

    def compare_logp(self, shares: RankShares, *chunks: TrajectoryBuffers) -> list[LogpGap]:
        with self.spans.span("compare logp"):
            return self.actor.compare_logp(shares.by_update(), chunks)

    def sequence_logp(self, shares: RankShares, *chunks: TrajectoryBuffers) -> SequenceSums:
        with self.spans.span("sequence logp"):
            return self.actor.sequence_logp(shares.by_update(), chunks)

    def recompute_logp(self, key: int, shares: RankShares, *chunks: TrajectoryBuffers) -> dict[str, Metric]:
        """Compute the policy's log-probabilities, and keep the batch under `key` for the calls up to its update. Its
        trajectories stay in the object store until then."""
        with self.spans.span("recompute logp"):
            batch, metrics = self.actor.recompute_logp(shares.by_update(), list(chunks))
        self._held.keep(key, batch)
        return metrics

    def replace_shares(self, key: int, shares: RankShares) -> None:
        """Replace advantages and loss weights of the held batch."""
        self._held.keep(key, replace(self._held.of(key), shares=shares.by_update()))

    def reference_logp(self, key: int) -> None:
        with self.spans.span("reference logp"):
            self._held.keep(key, self.actor.reference_logp(self._held.of(key)))

    def teacher_outputs(self, key: int, teachers: np.ndarray | None, *scores: ScoreColumn) -> None:
        with self.spans.span("teacher"):
            self._held.keep(key, self.actor.teacher_outputs(self._held.of(key), teachers, scores))

    def kl_penalties(self, key: int, coefficient: float) -> tuple[dict[str, Metric], dict[int, float]]:
        """Compute KL penalties. Returns metrics and, on ranks of the last stage, the sum of penalties per sample of the
        rank's share."""
        with self.spans.span("kl penalties"):
            batch, metrics = self.actor.kl_penalties(self._held.of(key), coefficient)
        self._held.keep(key, batch)
        return metrics, {sample: float(penalty.sum(dtype=np.float64)) for sample, penalty in batch.penalties.items()}

    def refresh_reference(self) -> None:
        with self.spans.span("refresh reference"):
            self.actor.refresh_reference()

    def offload(self, parts: tuple[str, ...]) -> int:
        away = super().offload(parts)
        if "params" in parts:  # a checkpoint moves these models to the device
            reference = [] if self.actor.reference is None else [self.actor.reference]
            for model in (*reference, *self.actor.averages.values()):
                model.memory.offload()
        return away

    @remote_method(num_returns=2)
    def estimate(self, key: int, *values: TokenColumn) -> tuple[dict[str, Metric], TokenColumn]:
        """Compute per-token advantages. Returns metrics and, on ranks of the last stage, the returns (targets of a
        critic) of the rank's share."""
        with self.spans.span("estimate"):
            by_sample = joined(values) if self.actor.estimator.needs.values else None
            batch, metrics, returns = self.actor.estimate(self._held.of(key), by_sample)
        self._held.keep(key, batch)
        return metrics, TokenColumn.of(returns)

    def update(
        self,
        key: int,
        entropy_coefficient: float | None,
        shares: RankShares | None = None,
        *chunks: TrajectoryBuffers,
    ) -> list[dict[str, Metric]]:
        """Train on the held batch and drop it. With `shares` and `chunks`, the arguments of `recompute_logp`, compute
        the log-probabilities of that batch first. Returns the metrics of each pass."""
        reports = [self.recompute_logp(key, shares, *chunks)] if shares is not None else []
        batch = replace(self._held.take(key), entropy_coefficient=entropy_coefficient)
        for index in range(len(batch.shares)):
            with self.spans.span("update"):
                reports.append(self.actor.update(batch, index))
        self.actor.gather_parameters()  # afterwards, ranks read their weights without collectives
        if self.actor.averages:
            with self.spans.span("moving average"):
                self.actor.update_averages()
        return reports

    def device_memory(self) -> DeviceMemory | None:
        """Measure the memory of this rank's GPU; None on a CPU."""
        from mcore_rl.processes.device_memory import device_memory

        return device_memory()

    def endpoint(self) -> Endpoint:
        """Return the location from which this rank sends weights."""
        from mcore_rl.weights.transports.nccl_group import nccl_version
        from mcore_rl.weights.transports.segments import device_uuid
        from mcore_rl.weights.transports.topology import Endpoint

        return Endpoint(this_host(), ray.util.get_node_ip_address(), device_uuid(), nccl_version())

    def sync_plan(self, engine: EngineLayout, topology: Topology, bucket_bytes: int, num_slots: int) -> SyncPlan:
        """Compute the plan of weight syncs, which is the same on every rank."""
        return self.actor.sync_plan(engine, topology, bucket_bytes, num_slots)

    def disconnect_weights(self) -> None:
        """End the current connection, and unmap the staging buffers of other ranks."""
        if self._setup is not None:
            self._setup.disconnect()

    def create_buffers(self, plan: SyncPlan) -> dict[int, SharedNames]:
        """Create the staging buffers that this rank owns. Returns their names by buffer number. The buffers of the
        earlier connection are freed before: all processes have disconnected from them."""
        from mcore_rl.weights.connection import TrainerSetup

        self.actor.require_frozen(plan)
        if self._setup is not None:
            self._setup.close()
        self._setup = TrainerSetup(plan, self.actor.rank)
        return self._setup.create_buffers()

    def connect_weights(self, connection: Connection) -> None:
        """Join the transfer group. Collective: all processes of the sync."""
        assert self._setup is not None
        with self.spans.span("connect weights"):
            self._sender = self._setup.connect(connection)

    @remote_method(concurrency_group="watch")
    def unlink_buffers(self) -> None:
        """Remove the names of the staging buffers, even while this rank waits in `connect_weights`."""
        if self._setup is not None:
            self._setup.unlink()

    def send_weights(self, first_round: int) -> npt.NDArray[np.int64]:
        """Send one update, as WeightSender.send. Returns the bytes that this rank sent to each staging buffer."""
        return self._sender.send(self.actor.tensors(), self.spans.span, first_round=first_round)

    def delta_bytes(self) -> FrameBytes:
        """Return the bytes that the last update sent to other hosts with weights.delta."""
        return self._sender.delta_bytes

    def send_digests(self) -> None:
        """Send digests of the tensors, for engines to compare with their own."""
        with self.spans.span("digest"):
            self._sender.send_digests(self.actor.tensors())

    def export_hf(self, directory: str, source: str) -> None:
        """Implement ports.Actor.export_hf. Collective: all ranks."""
        from mcore_rl.megatron.roles.export import export_hf

        with self.spans.span("export"):
            export_hf(self.actor, directory, source)

    def export_adapter(self, directory: str, source: str) -> None:
        """Implement ports.Actor.export_adapter. Collective: all ranks."""
        from mcore_rl.megatron.roles.export import export_adapter

        with self.spans.span("export"):
            export_adapter(self.actor, directory, source)


# Threads per group: `watch` occupies one for the whole run, `pass_on` waits for this rank's main thread, and a save is
# written while the main thread trains.
TrainerActor = ray.remote(concurrency_groups={"watch": 2, "pass_on": 1, "save": 1}, max_restarts=0)(TrainerProcess)


@dataclass
class TrainerGroup(TrainedRankGroup[TrainerProcess]):
    """All ranks of the policy; implements ports.Actor."""

    @staged("logp", Phase.REPLACE)
    def recompute_logp(self, batch: Batch) -> BatchHandle:
        """Implement Actor.recompute_logp. With a single update, the call is deferred: `update` sends the batch and
        computes the log-probabilities, which saves one remote call."""
        handle = BatchHandle(batch, next(batch_keys))
        return handle if len(batch.updates) == 1 else self._sent(handle)

    @staged("reference", Phase.REPLACE)
    def reference_logp(self, handle: BatchHandle) -> BatchHandle:
        sent = self._sent(handle)
        self.call(TrainerProcess.reference_logp, sent.key).results()
        return sent

    @staged("teacher", Phase.REPLACE)
    def teacher_outputs(self, handle: BatchHandle, scores: ScoreRefs | None) -> BatchHandle:
        sent = self._sent(handle)
        columns = [scores.by_rank[dp] if scores else () for dp in self.ranks.dp_rank_of]
        self.call_each(
            TrainerProcess.teacher_outputs, [(sent.key, handle.batch.teachers, *own) for own in columns]
        ).results()
        return sent

    def compare(self, batch: Batch) -> dict[str, Metric]:
        """Return metrics of the differences between the policy's log-probabilities and the recorded ones."""
        return merge_metrics(self.call_each(TrainerProcess.compare, self.batch_refs(batch)).results())

    @staged("compare_logp", Phase.KEEP)  # no sync follows: engines keep their weights
    def compare_logp(self, batch: Batch) -> list[LogpGap]:
        by_rank = self.call_each(TrainerProcess.compare_logp, self.batch_refs(batch)).results()
        return [functools.reduce(operator.add, parts) for parts in zip(*by_rank, strict=True)]

    @staged("logp", Phase.REPLACE)
    def sequence_logp(self, batch: Batch) -> SequenceLogp:
        by_rank = self.call_each(TrainerProcess.sequence_logp, self.batch_refs(batch)).results()
        reported = [by_rank[rank] for rank in self.ranks.reporting]
        policy = _by_response(len(batch), [sums.policy for sums in reported])
        references = [sums.reference for sums in reported if sums.reference is not None]
        return SequenceLogp(policy, _by_response(len(batch), references) if references else None)

    @staged("reference", Phase.REPLACE)
    def kl_penalties(self, handle: BatchHandle, coefficient: float) -> tuple[BatchHandle, np.ndarray]:
        results = self.call(TrainerProcess.kl_penalties, handle.key, coefficient).results()
        sums = np.zeros(len(handle.batch), np.float32)
        for rank in self.ranks.reporting:
            for sample, total in results[rank][1].items():
                sums[sample] = total
        return with_metrics(handle, [metrics for metrics, _ in results]), sums

    def with_advantages(self, handle: BatchHandle, advantages: np.ndarray) -> BatchHandle:
        other = replace(handle, batch=replace(handle.batch, advantages=np.asarray(advantages, np.float32)))
        if other.is_sent:
            shares = [(other.key, of_rank) for of_rank in self.shares_of(other.batch)]
            self.call_each(TrainerProcess.replace_shares, shares).results()
        return other

    @staged("reference", Phase.REPLACE)
    def refresh_reference(self) -> None:
        self.call(TrainerProcess.refresh_reference).results()

    @staged("advantages", Phase.REPLACE)
    def estimate(self, handle: BatchHandle, values: TokenRefs | None) -> tuple[BatchHandle, TokenRefs]:
        sent, size = self._sent(handle), len(self.ranks.reporting)
        columns = [values.overlapping(dp, size) if values else () for dp in self.ranks.dp_rank_of]
        results = self.call_each_for_two(TrainerProcess.estimate, [(sent.key, *own) for own in columns])
        metrics = self.watch.get([of_rank for of_rank, _ in results])
        returns = TokenRefs(tuple(results[rank][1] for rank in self.ranks.reporting), sent.key)
        return with_metrics(sent, metrics), returns

    @staged("update", Phase.REPLACE)
    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        """Implement Actor.update. A batch that is not on the ranks yet is sent with the call."""
        batch = [()] * len(self.processes) if handle.is_sent else self.batch_refs(handle.batch)
        arguments = [(handle.key, handle.entropy_coefficient, *own) for own in batch]
        by_rank = self.call_each(TrainerProcess.update, arguments).results()
        return merge_metrics([metrics for of_rank in by_rank for metrics in of_rank])

    def _sent(self, handle: BatchHandle) -> BatchHandle:
        """Send the batch unless the ranks hold it, and compute the policy's log-probabilities."""
        if handle.is_sent:
            return handle
        arguments = [(handle.key, *own) for own in self.batch_refs(handle.batch)]
        metrics = self.call_each(TrainerProcess.recompute_logp, arguments).results()
        return with_metrics(replace(handle, is_sent=True), metrics)

    def device_memory(self) -> list[DeviceMemory | None]:
        """Measure the memory of every rank's GPU; None for a rank on a CPU."""
        return self.call(TrainerProcess.device_memory).results()

    @staged(None, Phase.KEEP)
    def export_hf(self, directory: str, source: str) -> None:
        self.call(TrainerProcess.export_hf, directory, source).results()

    @staged(None, Phase.KEEP)
    def export_adapter(self, directory: str, source: str) -> None:
        self.call(TrainerProcess.export_adapter, directory, source).results()

    @staticmethod
    def store(buffers: TrajectoryBuffers) -> BuffersRef:
        """Wrap trajectories that the driver holds as a reference for Batch.chunks."""
        return BuffersRef(DriverChunk(buffers))


def _by_response(num_responses: int, by_rank: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Join values by sample. Shapes: result float64 [num_responses]."""
    values = np.full(num_responses, np.nan)
    for of_rank in by_rank:
        values[list(of_rank)] = list(of_rank.values())
    return values
