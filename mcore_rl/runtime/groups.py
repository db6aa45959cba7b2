"""Driver-side handles of the processes, as the Protocols that the trainer and the collector know."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from mcore_rl.runtime.health import Watch
from mcore_rl.types import (
    Batch,
    BatchHandle,
    BuffersRef,
    Metric,
    RolloutResult,
    RolloutTask,
    SavedFile,
    SavedState,
    Span,
    TokenRefs,
    TrajectoryBuffers,
    merge_metrics,
)

_keys = itertools.count(1)
"""Of batches on ranks: never used again, so that a handle of an earlier batch is recognised."""


@dataclass(frozen=True)
class RanksSave:
    """A checkpoint that the trainer ranks are writing; `saved` refers to rank 0's account of it."""

    saved: Any
    watch: Watch

    def done(self) -> bool:
        ready, _ = ray.wait([self.saved], timeout=0, fetch_local=False)
        return bool(ready)

    def result(self) -> SavedState:
        """Raises: what any rank raised, as Watch.get says it."""
        saved: SavedState = self.watch.get([self.saved])[0]
        return saved


@dataclass(frozen=True)
class RankMap:
    """`dp_rank_of[rank]` is the data-parallel coordinate of a rank; ranks that share it (tensor, pipeline and context
    peers) receive the same samples. `speakers[dp]` is the one of them that returns what all have."""

    dp_rank_of: tuple[int, ...]
    speakers: tuple[int, ...]


@dataclass
class RankGroup:
    """All ranks of a model that is trained."""

    handles: list[Any]
    ranks: RankMap
    watch: Watch

    def shares_of(self, batch: Batch) -> list[tuple[Any, ...]]:
        """What each rank needs: its shares, one per update, and references of all trajectories."""
        size = len(self.ranks.speakers)
        by_update = [batch.shares(update, size) for update in range(len(batch.updates))]
        shares: list[Any] = [list(of_rank) for of_rank in zip(*by_update, strict=True)]
        if size < len(self.handles):
            # One object per data-parallel share, however many tensor and pipeline peers read it.
            shares = [ray.put(of_rank) for of_rank in shares]
        return [(shares[dp], *batch.chunks) for dp in self.ranks.dp_rank_of]

    def on_every_rank(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Results of a method of all ranks, each with its own arguments."""
        given = arguments if arguments is not None else [()] * len(self.handles)
        calls = zip(self.handles, given, strict=True)
        return self.watch.get([getattr(handle, method).remote(*own) for handle, own in calls])

    def start_save(self, directory: str, *, snapshot: bool) -> RanksSave:
        """Every rank plans its files, and copies what goes into them if `snapshot`; then all write, and rank 0 gathers
        where the blocks are, while this process goes on."""
        self.on_every_rank("plan_save", [(directory, snapshot)] * len(self.handles))
        reports = [handle.write_save.remote() for handle in self.handles]
        return RanksSave(self.handles[0].finish_save.remote(*reports), self.watch)

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        """Collective over all ranks."""
        self.on_every_rank("load", [(directory, files)] * len(self.handles))

    def offload(self, parts: tuple[str, ...]) -> int:
        """Sends those of `parts` that the role's offload section names to host memory; returns the bytes away, of all
        ranks."""
        return sum(self.on_every_rank("offload", [(parts,)] * len(self.handles)))

    def spans(self) -> list[Span]:
        return drain_spans(self.watch, self.handles)


@dataclass
class TrainerGroup(RankGroup):
    """All ranks of the policy: a ports.Actor."""

    def recompute_logp(self, batch: Batch) -> BatchHandle:
        """Log-probabilities of the current policy, which stay on the ranks with the batch. The only update of a batch
        finds them itself: nothing is sent then."""
        handle = BatchHandle(batch, next(_keys))
        return handle if len(batch.updates) == 1 else self._sent(handle)

    def reference_logp(self, handle: BatchHandle) -> BatchHandle:
        """Log-probabilities of the reference, which stay on the ranks."""
        sent = self._sent(handle)
        self.on_every_rank("reference_logp", [(sent.key,)] * len(self.handles))
        return sent

    def compare(self, batch: Batch) -> dict[str, Metric]:
        """How far the policy's log-probabilities are from those that came with the batch."""
        return merge_metrics(self.on_every_rank("compare", self.shares_of(batch)))

    def kl_penalties(self, handle: BatchHandle, coefficient: float) -> tuple[BatchHandle, np.ndarray]:
        """What the KL takes off the rewards, of a batch from `reference_logp`. Token by token it stays on the ranks for
        `estimate`; here the sums over responses. Shapes: float32 [B]."""
        found = self.on_every_rank("kl_penalties", [(handle.key, coefficient)] * len(self.handles))
        sums = np.zeros(len(handle.batch), np.float32)
        for speaker in self.ranks.speakers:
            for sample, total in found[speaker][1].items():
                sums[sample] = total
        return _with_metrics(handle, [metrics for metrics, _ in found]), sums

    def with_advantages(self, handle: BatchHandle, advantages: np.ndarray) -> BatchHandle:
        """The batch with other advantages; what the ranks have found of its tokens stays."""
        other = replace(handle, batch=replace(handle.batch, advantages=np.asarray(advantages, np.float32)))
        if other.is_sent:
            shares = self.shares_of(other.batch)
            self.on_every_rank("replace_shares", [(other.key, of_rank) for of_rank, *_ in shares])
        return other

    def refresh_reference(self) -> None:
        """The reference takes the policy's present weights."""
        self.on_every_rank("refresh_reference")

    def estimate(self, handle: BatchHandle, values: TokenRefs | None) -> tuple[BatchHandle, TokenRefs]:
        """Advantages token by token, which stay on the ranks for the batch's updates; `values` are a critic's. Returns
        the returns too."""
        sent, size = self._sent(handle), len(self.ranks.speakers)
        columns = [values.overlapping(dp, size) if values else () for dp in self.ranks.dp_rank_of]
        calls = [rank.estimate.remote(sent.key, *own) for rank, own in zip(self.handles, columns, strict=True)]
        metrics = self.watch.get([found for found, _ in calls])
        returns = TokenRefs(tuple(calls[speaker][1] for speaker in self.ranks.speakers), sent.key)
        return _with_metrics(sent, metrics), returns

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        """One optimizer step per entry of the batch's updates, after which the ranks let it go. A batch that nothing
        else has sent comes with the call.

        Raises: NonFiniteError before a non-finite step.
        """
        brought = [()] * len(self.handles) if handle.is_sent else self.shares_of(handle.batch)
        reports = self.on_every_rank("update", [(handle.key, *own) for own in brought])
        return merge_metrics([report for reports_of_rank in reports for report in reports_of_rank])

    def _sent(self, handle: BatchHandle) -> BatchHandle:
        """The batch on the ranks, with the policy's log-probabilities."""
        if handle.is_sent:
            return handle
        arguments = [(handle.key, *own) for own in self.shares_of(handle.batch)]
        return _with_metrics(replace(handle, is_sent=True), self.on_every_rank("recompute_logp", arguments))

    def export_hf(self, directory: str, source: str) -> None:
        """Writes the weights as an HF directory; collective over all ranks."""
        self.on_every_rank("export_hf", [(directory, source)] * len(self.handles))

    def export_adapter(self, directory: str, source: str) -> None:
        """Writes the adapters of a LoRA run in PEFT's format; collective over all ranks."""
        self.on_every_rank("export_adapter", [(directory, source)] * len(self.handles))

    @staticmethod
    def store(buffers: TrajectoryBuffers) -> BuffersRef:
        """A reference for Batch.chunks of trajectories that were made on the driver."""
        return BuffersRef(ray.put(buffers))


@dataclass
class CriticGroup(RankGroup):
    """All ranks of the critic. `own_batch` gives a batch the data-parallel ranks of this group (batching.spread)."""

    own_batch: Callable[[Batch], Batch]

    def values(self, batch: Batch) -> TokenRefs:
        """Of every trained token, in the object store; the batch stays on the ranks for its updates."""
        key, arguments = next(_keys), self.shares_of(self.own_batch(batch))
        calls = [handle.values.remote(key, *own) for handle, own in zip(self.handles, arguments, strict=True)]
        self.watch.get([done for done, _ in calls])
        return TokenRefs(tuple(calls[speaker][1] for speaker in self.ranks.speakers), key)

    def update(self, values: TokenRefs, returns: TokenRefs) -> dict[str, Metric]:
        """One optimizer step per update of the batch that `values` are of.

        Raises: NonFiniteError before a non-finite step.
        """
        size = len(self.ranks.speakers)
        columns = [returns.overlapping(dp, size) for dp in self.ranks.dp_rank_of]
        reports = self.on_every_rank("update", [(values.key, *own) for own in columns])
        return merge_metrics([report for reports_of_rank in reports for report in reports_of_rank])


@dataclass
class EnginePool:
    """All rollout engines."""

    handles: list[Any]
    watch: Watch

    @property
    def num_engines(self) -> int:
        return len(self.handles)

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Runs task i on engine i % num_engines; the buffers stay in the object store."""
        calls = [self.handles[i % len(self.handles)].run.remote(task) for i, task in enumerate(tasks)]
        scalars = self.watch.get([scalars_ref for _, scalars_ref in calls])
        return [(chunk, result) for (chunk, _), result in zip(calls, scalars, strict=True)]

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        """Puts rewards, accuracies and scores into the records of tasks that `run` has run, on their engines."""
        calls = [
            self.handles[i % len(self.handles)].amend_records.remote(
                task.records, scalars.rewards, scalars.accuracies, dict(scalars.scores)
            )
            for i, (task, (_, scalars)) in enumerate(zip(tasks, results, strict=True))
            if task.records is not None
        ]
        self.watch.get(calls)

    def send(self, method: str, *arguments: Any) -> list[Any]:
        """References of the results of a method on every engine."""
        return [getattr(handle, method).remote(*arguments) for handle in self.handles]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.watch.get(self.send(method, *arguments))

    def sleep(self, keep_weights: bool) -> int:
        """Frees the memory of every engine; returns the bytes that all of them gave up."""
        return sum(self.call("sleep", keep_weights))

    def wake_up(self, part: str) -> None:
        """Gives "weights" or "kv_cache" back to every engine."""
        self.call("wake_up", part)

    def spans(self) -> list[Span]:
        return drain_spans(self.watch, self.handles)


def _with_metrics(handle: BatchHandle, found: Sequence[Mapping[str, Metric]]) -> BatchHandle:
    return replace(handle, metrics=merge_metrics([handle.metrics, *found]))


def drain_spans(watch: Watch, handles: Sequence[Any]) -> list[Span]:
    """What the processes have recorded since the last time."""
    return [span for spans in watch.get([handle.drain_spans.remote() for handle in handles]) for span in spans]
