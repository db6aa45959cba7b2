"""Groups of processes, from the driver's side: calls to all ranks of a model, and batches for them. Roles besides
trainer ranks and rollout engines: judge, reward model, teacher and critic."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import ray

from mcore_rl.resolved.placement import Guests
from mcore_rl.runtime.calls import FanOut, ProcessHandle, Rank_co, Ref, passed
from mcore_rl.runtime.delivery import Delivery, rows_by_rank
from mcore_rl.runtime.health import Starts, Watch
from mcore_rl.runtime.phases import Phase, Stages, staged
from mcore_rl.runtime.progress.polls import shown_reads
from mcore_rl.runtime.roles.base import RankProcess, RunProcess, SetUpContext, TrainedRankProcess
from mcore_rl.types import Batch, BatchHandle, Metric, RankShares, SavedFile, SavedState, Span, merge_metrics

if TYPE_CHECKING:
    from ray.actor import ActorClass

    from mcore_rl.types import TrajectoryBuffers

TrainedRank_co = TypeVar("TrainedRank_co", bound=TrainedRankProcess, covariant=True)
RankBatchRefs = tuple[RankShares | Ref[RankShares], *tuple["Ref[TrajectoryBuffers]", ...]]
"""A rank's shares of a batch, and its trajectories if it has any."""

batch_keys = itertools.count(1)
"""Keys of batches on ranks. A key is never reused, so that ranks detect a handle of an earlier batch."""


@dataclass(frozen=True)
class RankMap:
    """`dp_rank_of[rank]` is the data-parallel coordinate of a rank. Ranks that share it (tensor, pipeline and context
    peers) receive the same samples. `reporting[dp]` is the peer that returns the results of all."""

    dp_rank_of: tuple[int, ...]
    reporting: tuple[int, ...]


@dataclass(frozen=True)
class RanksSave:
    """A checkpoint that the ranks are writing; `saved` is rank 0's result."""

    saved: Ref[SavedState]
    watch: Watch

    def done(self) -> bool:
        ready, _ = ray.wait([self.saved], timeout=0, fetch_local=False)
        return bool(ready)

    def result(self) -> SavedState:
        """Wait for the checkpoint. Raises: the error of any rank, as Watch.get."""
        return self.watch.get([self.saved])[0]


@dataclass
class RankGroup(FanOut[Rank_co]):
    """All ranks of a model."""

    ranks: RankMap
    stages: Stages

    @cached_property
    def _delivery(self) -> Delivery:
        return Delivery([self.processes[rank] for rank in self.ranks.reporting], self.watch)

    def set_up(self, context: SetUpContext, visible: Sequence[str | None]) -> Starts:
        """Begin the set-up of all ranks, each with the GPUs that it may see. Each rank is called directly, because a
        set-up takes much longer than a call."""
        address = self.watch.get([self.processes[0].call(RankProcess.free_address)])[0]
        starts: Starts = {}
        for rank, (process, devices) in enumerate(zip(self.processes, visible, strict=True)):
            own = replace(context, visible_devices=devices)
            starts[self._begin(process, own, rank, len(visible), address)] = [process]
        return starts

    def _begin(
        self, process: ProcessHandle[RankProcess], context: SetUpContext, rank: int, world_size: int, address: str
    ) -> Ref[None]:
        return process.call(RankProcess.setup, context, rank, world_size, address)

    def spans(self) -> list[Span]:
        return [span for spans in self.call(RankProcess.drain_spans).results() for span in spans]


@dataclass
class TrainedRankGroup(RankGroup[TrainedRank_co]):
    """All ranks of a model that is trained."""

    def batch_refs(self, batch: Batch) -> list[RankBatchRefs]:
        """Deliver a batch. Returns the arguments of each rank: its shares, and a reference to their trajectories."""
        rows, places = rows_by_rank(batch, len(self.ranks.reporting))
        delivery = self._delivery.begin(batch.chunks, rows)
        shares = self._shares(batch, places)  # while the ranks fetch the trajectories
        trajectories = delivery.wait()
        return [(shares[dp], *trajectories[dp]) for dp in self.ranks.dp_rank_of]

    def shares_of(self, batch: Batch) -> list[RankShares | Ref[RankShares]]:
        """Return the shares of each rank, for a batch whose trajectories the ranks already have."""
        _, places = rows_by_rank(batch, len(self.ranks.reporting))
        shares = self._shares(batch, places)
        return [shares[dp] for dp in self.ranks.dp_rank_of]

    def _shares(self, batch: Batch, places: np.ndarray) -> list[RankShares | Ref[RankShares]]:
        """Return the shares by data-parallel rank."""
        shares = batch.shares(len(self.ranks.reporting), places)
        # Peers (tensor, pipeline) on one node receive their shares once, with the call that one of them forwards. If
        # the peers are on several nodes, put the shares into the object store once instead.
        return [ray.put(of_rank) if dp in self._spread_ranks else of_rank for dp, of_rank in enumerate(shares)]

    @cached_property
    def _spread_ranks(self) -> set[int]:
        """Data-parallel ranks whose peers run on several nodes."""
        # Each pair is one node with peers of a data-parallel rank.
        pairs = set(zip(self.ranks.dp_rank_of, self.nodes, strict=True))
        return {dp for dp, nodes in Counter(dp for dp, _ in pairs).items() if nodes > 1}

    @staged(None, Phase.KEEP)
    def start_save(self, directory: str, *, snapshot: bool) -> RanksSave:
        """Begin a checkpoint: every rank plans its files and, with `snapshot`, copies their contents. Then all ranks
        write and rank 0 completes the checkpoint, while the driver continues."""
        self.call(TrainedRankProcess.plan_save, directory, snapshot).results()
        # Rank 0 receives the references as arguments, so the reports do not pass through the driver, which continues at
        # once.
        reports = [rank.call(TrainedRankProcess.write_save) for rank in self.processes]
        saved = self.processes[0].call(TrainedRankProcess.finish_save, *map(passed, reports))
        return RanksSave(saved, self.watch)

    @staged("load", Phase.KEEP)
    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        """Load a checkpoint on all ranks."""
        with shown_reads(self.stages.board, self.watch, self.processes):
            self.call(TrainedRankProcess.load, directory, files).results()

    def offload(self, parts: tuple[str, ...]) -> int:
        """Move `parts` to host memory if the configuration offloads them. Returns the bytes in host memory, of all
        ranks."""
        return sum(self.call(TrainedRankProcess.offload, parts).results())

    def free_cache(self) -> None:
        """Return the memory that the ranks do not use to their GPUs. All state stays where it is."""
        self.offload(())


class RoleGroup(Protocol):
    """Processes of a role, from the driver's side."""

    @property
    def processes(self) -> Sequence[ProcessHandle[RunProcess]]: ...

    def set_up(self, context: SetUpContext, visible: Sequence[str | None]) -> Starts:
        """Begin the set-up of all processes, each with the GPUs that it may see. If the processes take turns on a
        device, they have freed it when the set-ups have ended."""

    def spans(self) -> list[Span]: ...


@dataclass(frozen=True)
class Role:
    """Processes of the Ray actor class `actor`; messages name each by `name` and its number. `group` builds the
    driver's group from the processes, the node of each, the watch, and the stages of its calls."""

    name: str
    actor: ActorClass
    guests: Guests
    group: Callable[[Sequence[ProcessHandle[Any]], Sequence[int], Watch, Stages], RoleGroup]


def with_metrics(handle: BatchHandle, found: Sequence[Mapping[str, Metric]]) -> BatchHandle:
    return replace(handle, metrics=merge_metrics([handle.metrics, *found]))


def drain_spans(watch: Watch, processes: Sequence[ProcessHandle[RunProcess]]) -> list[Span]:
    """Return the spans that the processes recorded since the last call."""
    calls = [process.call(RunProcess.drain_spans) for process in processes]
    return [span for spans in watch.get(calls) for span in spans]
