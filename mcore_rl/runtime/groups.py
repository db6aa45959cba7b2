"""Driver-side handles of the processes, as the Protocols that the trainer and the collector know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from mcore_rl.rollout.worker import RolloutTask
from mcore_rl.runtime.health import Watch
from mcore_rl.types import (
    Batch,
    Metric,
    RolloutScalars,
    SavedFile,
    SavedState,
    Span,
    TrajectoryBuffers,
    merge_metrics,
)


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


@dataclass
class TrainerGroup:
    """All ranks of the policy. `dp_rank_of[rank]` is the data-parallel coordinate of a rank; ranks that share it
    (tensor, pipeline and context peers) receive the same samples."""

    handles: list[Any]
    dp_rank_of: list[int]
    watch: Watch

    def annotate(self, batch: Batch) -> dict[str, Metric]:
        """Recomputes log-probabilities on the ranks, where they and the batch stay for its updates. The only update
        of a batch finds them itself: nothing is sent then."""
        if len(batch.updates) == 1:
            return {}
        return merge_metrics(self._on_every_rank("annotate", self._arguments(batch)))

    def update(self, batch: Batch) -> dict[str, Metric]:
        """One optimizer step per entry of batch.updates.

        Raises: NonFiniteError before a non-finite step.
        """
        sent = len(batch.updates) > 1
        arguments = [()] * len(self.handles) if sent else self._arguments(batch)
        reports = self._on_every_rank("update", arguments)
        return merge_metrics([report for reports_of_rank in reports for report in reports_of_rank])

    def _arguments(self, batch: Batch) -> list[tuple[Any, ...]]:
        """What each rank needs: its shares, one per update, and references of all trajectories."""
        num_dp_ranks = max(self.dp_rank_of) + 1
        by_update = [batch.shares(update, num_dp_ranks) for update in range(len(batch.updates))]
        shares: list[Any] = [list(of_rank) for of_rank in zip(*by_update, strict=True)]
        if num_dp_ranks < len(self.dp_rank_of):
            # One object per data-parallel share, however many tensor and pipeline peers read it.
            shares = [ray.put(of_rank) for of_rank in shares]
        return [(shares[dp], *batch.chunks) for dp in self.dp_rank_of]

    def _on_every_rank(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = zip(self.handles, arguments, strict=True)
        return self.watch.get([getattr(handle, method).remote(*given) for handle, given in calls])

    def start_save(self, directory: str, *, snapshot: bool) -> RanksSave:
        """Every rank plans its files, and copies what goes into them if `snapshot`; then all write, and rank 0 gathers
        where the blocks are, while this process goes on."""
        self.watch.get([handle.plan_save.remote(directory, snapshot) for handle in self.handles])
        reports = [handle.write_save.remote() for handle in self.handles]
        return RanksSave(self.handles[0].finish_save.remote(*reports), self.watch)

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        """Collective over all ranks."""
        self.watch.get([handle.load.remote(directory, files) for handle in self.handles])

    def export_hf(self, directory: str, source: str) -> None:
        """Writes the weights as an HF directory; collective over all ranks."""
        self.watch.get([handle.export_hf.remote(directory, source) for handle in self.handles])

    def offload(self, parts: tuple[str, ...]) -> int:
        """Sends those of `parts` that actor.offload names to host memory; returns the bytes away, of all ranks."""
        return sum(self.watch.get([handle.offload.remote(parts) for handle in self.handles]))

    def spans(self) -> list[Span]:
        return _drain(self.watch, self.handles)

    @staticmethod
    def store(buffers: TrajectoryBuffers) -> Any:
        """A reference for Batch.chunks of trajectories that were made on the driver."""
        return ray.put(buffers)


@dataclass
class EnginePool:
    """All rollout engines."""

    handles: list[Any]
    watch: Watch

    @property
    def num_engines(self) -> int:
        return len(self.handles)

    def run(self, tasks: Sequence[RolloutTask]) -> list[tuple[Any, RolloutScalars]]:
        """Runs task i on engine i % num_engines; the buffers stay in the object store."""
        calls = [self.handles[i % len(self.handles)].run.remote(task) for i, task in enumerate(tasks)]
        scalars = self.watch.get([scalars_ref for _, scalars_ref in calls])
        return [(chunk, result) for (chunk, _), result in zip(calls, scalars, strict=True)]

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
        return _drain(self.watch, self.handles)


def _drain(watch: Watch, handles: Sequence[Any]) -> list[Span]:
    return [span for spans in watch.get([handle.drain_spans.remote() for handle in handles]) for span in spans]
