"""What all kinds of processes have in common, and all groups of ranks.

Processes are Ray actors. Construction does nothing; `setup` does, so that what goes wrong there comes back as the typed
error it was. `watch` runs in a concurrency group of its own and never returns: its failing is how a death is noticed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import ray

from mcore_rl.config.schema import Config
from mcore_rl.errors import McoreRLError
from mcore_rl.runtime.addresses import free_port, meet_at
from mcore_rl.runtime.agreement import HostFacts, Question, answer
from mcore_rl.runtime.collectives import Collective, pending_collectives
from mcore_rl.runtime.cores import share_cores
from mcore_rl.runtime.isolation.accounts import other_users
from mcore_rl.runtime.output import write_output_to
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.types import (
    Metric,
    SavedFile,
    SavedState,
    Span,
    TokenColumn,
    TrajectoryBuffers,
)
from mcore_rl.weights.transports.hosts import Host, this_host

if TYPE_CHECKING:
    pass
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mcore_rl.resolved.placement import Guests
from mcore_rl.runtime.delivery import Delivery, FetchRequest, fetch, rows_by_rank
from mcore_rl.runtime.fanout import Calls, FanOut, call_all
from mcore_rl.runtime.health import Watch
from mcore_rl.types import Batch, BatchHandle, merge_metrics


def see_only(devices: str | None) -> None:
    """Hides the node's other GPUs from this process, before torch is imported in it; None: Ray has done so."""
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices


class RunProcess:
    """What all processes have in common."""

    def __init__(self, name: str, logs: str | None = None, peers: int | None = None) -> None:
        """What the process writes goes to a file of its name in the directory `logs`; None: where Ray puts it. It has
        one of `peers` parts of the host's cores; None: as many threads as the environment says."""
        if peers is not None:
            share_cores(peers)
        if logs is not None:
            write_output_to(Path(logs), name)
        self.name = name
        self.spans = SpanRecorder(name)
        self._producers: dict[str, Any] = {}
        meet_at(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        threading.Event().wait()

    @ray.method(concurrency_group="watch")
    def where(self) -> tuple[Host, int]:
        """Host and process id."""
        return this_host(), os.getpid()

    @ray.method(concurrency_group="watch")
    def seconds_stuck(self) -> float:
        """How long what this process does by itself has not come forward; calls that others wait for do not count."""
        return 0.0

    @ray.method(concurrency_group="watch")
    def host_facts(self, question: Question) -> HostFacts:
        return answer(question)

    @ray.method(concurrency_group="watch")
    def other_users(self) -> list[str]:
        """Names of other users who are logged in on this host."""
        return other_users()

    @ray.method(concurrency_group="watch")
    def pending_collectives(self) -> list[Collective]:
        """What this process waits for its peers in."""
        return pending_collectives()

    @ray.method(concurrency_group="watch")
    def free_address(self) -> str:
        """tcp://host:port that others can reach; the port was free a moment ago."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"

    def drain_spans(self) -> list[Span]:
        return self.spans.drain()

    @ray.method(num_returns=2)
    def fetch(self, wanted: FetchRequest) -> tuple[None, TrajectoryBuffers]:
        """For this process, and for ranks that read the same. The first says no more than that they have come."""
        return self.fetched(wanted)

    def fetched(self, wanted: FetchRequest) -> tuple[None, TrajectoryBuffers]:
        with self.spans.span("fetch trajectories"):
            return None, fetch(wanted, self._producers)


class RankProcess(RunProcess):
    """One rank of a process group."""

    @ray.method(concurrency_group="pass_on")
    def pass_on(self, method: str, arguments: list[tuple[Any, ...]], neighbours: list[Any] | None) -> list[Any]:
        """Results of a method of the ranks of this node, this one among them (see fanout). They come with the first
        call."""
        if neighbours is not None:
            self._neighbours = neighbours
        return call_all(self._neighbours, method, arguments)

    def visible_devices(self) -> str:
        """The GPU that Ray gave this process, by the name that CUDA takes."""
        return os.environ["CUDA_VISIBLE_DEVICES"]


class TrainedRankProcess(RankProcess):
    """One rank of a model that is trained: what actor and critic have in common. `role` is the rank."""

    role: Any

    def offload(self, parts: tuple[str, ...]) -> int:
        """Returns the bytes of this rank that are away."""
        return int(self.role.trained.memory.offload(parts))

    def plan_save(self, directory: str, snapshot: bool) -> None:
        """What the two calls after it write."""
        from mcore_rl.megatron.checkpoint.writer import CheckpointWriter

        with self.spans.span("plan save"):
            self._save = CheckpointWriter(directory, self.role, snapshot=snapshot)

    @ray.method(concurrency_group="save")
    def write_save(self) -> Any:
        """In a thread of its own, while the main one trains."""
        with self.spans.span("write save"):
            return self._save.write()

    @ray.method(concurrency_group="save")
    def finish_save(self, *reports: Any) -> SavedState:
        """Rank 0 only; `reports` are those of all ranks. Fails as a rank's write_save did, if any did."""
        with self.spans.span("finish save"):
            return self._save.finish(reports)

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        from mcore_rl.megatron.checkpoint.restore import load_checkpoint

        with self.spans.span("load"):
            load_checkpoint(directory, self.role, files)


def joined(columns: Sequence[TokenColumn]) -> dict[int, Any]:
    """Arrays by sample, of several columns."""
    return {sample: values for column in columns for sample, values in column.by_sample().items()}


T = TypeVar("T")


class Held(Generic[T]):
    """The one batch that a rank keeps between calls, under the key that the driver gave it."""

    def __init__(self) -> None:
        self._key: int | None = None
        self._batch: T | None = None

    def keep(self, key: int, batch: T) -> None:
        """In the place of what was there."""
        self._key, self._batch = key, batch

    def of(self, key: int) -> T:
        """Raises: McoreRLError for the key of a batch that is not here (any more)."""
        if self._batch is None or key != self._key:
            raise McoreRLError(f"batch {key} is not on this rank, which holds {self._key or 'none'}")
        return self._batch

    def take(self, key: int) -> T:
        """As `of`; nothing is here afterwards."""
        batch = self.of(key)
        self._key = self._batch = None
        return batch


batch_keys = itertools.count(1)
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
    nodes: Sequence[int]
    """Of each rank."""
    ranks: RankMap
    watch: Watch

    def __post_init__(self) -> None:
        self._fan_out = FanOut(self.handles, self.nodes)

    @cached_property
    def _delivery(self) -> Delivery:
        return Delivery([self.handles[speaker] for speaker in self.ranks.speakers], self.watch)

    def sent_with(self, batch: Batch) -> list[tuple[Any, ...]]:
        """What each rank needs: its RankShares, and a reference of the trajectories that they are of."""
        rows, places = rows_by_rank(batch, len(self.ranks.speakers))
        trajectories = self._delivery.deliver(batch.chunks, rows)
        shares = self._shares(batch, places)
        return [(shares[dp], *trajectories[dp]) for dp in self.ranks.dp_rank_of]

    def shares_of(self, batch: Batch) -> list[Any]:
        """The shares of each rank, of a batch whose trajectories it has."""
        _, places = rows_by_rank(batch, len(self.ranks.speakers))
        shares = self._shares(batch, places)
        return [shares[dp] for dp in self.ranks.dp_rank_of]

    def _shares(self, batch: Batch, places: np.ndarray) -> list[Any]:
        """By data-parallel rank."""
        shares = batch.shares(len(self.ranks.speakers), places)
        # On one node it goes with the call, once for all tensor and pipeline peers; to several it is one object.
        return [ray.put(of_rank) if dp in self._spread_shares else of_rank for dp, of_rank in enumerate(shares)]

    @cached_property
    def _spread_shares(self) -> set[int]:
        """Data-parallel ranks whose peers run on several nodes."""
        pairs = set(zip(self.ranks.dp_rank_of, self.nodes, strict=True))
        return {dp for dp, nodes in Counter(dp for dp, _ in pairs).items() if nodes > 1}

    def on_every_rank(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Results of a method of all ranks, each with its own arguments."""
        calls = self.begin(method, arguments)
        return calls.results(self.watch.get(calls.references))

    def begin(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> Calls:
        """As `on_every_rank`, without waiting."""
        return self._fan_out.begin(method, arguments)

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
        return [span for spans in self.on_every_rank("drain_spans") for span in spans]


def with_metrics(handle: BatchHandle, found: Sequence[Mapping[str, Metric]]) -> BatchHandle:
    return replace(handle, metrics=merge_metrics([handle.metrics, *found]))


def drain_spans(watch: Watch, handles: Sequence[Any]) -> list[Span]:
    """What the processes have recorded since the last time."""
    return [span for spans in watch.get([handle.drain_spans.remote() for handle in handles]) for span in spans]


@dataclass(frozen=True)
class Surroundings:
    """What set-ups share: `prompts` are references of the prompt sets, by name."""

    config: Config
    prompts: Mapping[str, Any]
    watch: Watch


SetUp = Callable[[Surroundings, list[Any], Sequence[str | None]], list[Any]]


@dataclass(frozen=True)
class Role:
    """Processes of the Ray actor class `process`, in whose messages each is `name` and its number.

    `set_up` starts the set-up of all, each with the GPUs that it may see (`see_only`), and returns a reference of the
    end of each; by then they have left the device if they are to leave it at all. `group` makes of the handles, and the
    node of each, what the run knows them by.
    """

    name: str
    process: Any
    guests: Guests
    set_up: SetUp
    group: Callable[[list[Any], Sequence[int], Watch], Any]


def set_up_ranks(around: Surroundings, handles: list[Any], visible: Sequence[str | None], *more: Any) -> list[Any]:
    """Ranks of one process group, which meet where the first of them is; `more` is what their set-up takes besides."""
    address = around.watch.get([handles[0].free_address.remote()])[0]
    return [
        handle.setup.remote(around.config, rank, len(handles), address, devices, *more)
        for rank, (handle, devices) in enumerate(zip(handles, visible, strict=True))
    ]
