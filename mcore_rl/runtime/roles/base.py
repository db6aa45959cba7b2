"""Base classes of the processes of a run.

Processes are Ray actors. The constructor does nothing that can fail: Ray reports an error in it as the death of the
actor, whereas errors of `setup` arrive as typed errors. `watch` has a concurrency group of its own and never returns,
so it fails exactly when the process dies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import ray

from mcore_rl.data.read_progress import READS, Reading
from mcore_rl.errors import McoreRLError
from mcore_rl.processes.compile_caches import use_node_directories
from mcore_rl.processes.stack_requests import request_stacks
from mcore_rl.processes.stacks import write_stacks_to
from mcore_rl.rollout.gateway.wire import GatewayAddress
from mcore_rl.runtime.addresses import free_port, meet_at
from mcore_rl.runtime.agreement import HostFacts, host_facts
from mcore_rl.runtime.calls import ProcessHandle, Ref, call_all, remote_method
from mcore_rl.runtime.collectives import pending_collectives
from mcore_rl.runtime.cores import share_cores
from mcore_rl.runtime.isolation.choice import other_users
from mcore_rl.runtime.output import stacks_file, write_output_to
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.runtime.trajectory_store import FetchRequest, Producer, fetch
from mcore_rl.types import SavedFile, SavedState, Span, TokenColumn, TrajectoryBuffers
from mcore_rl.weights.transports.hosts import Host, this_host

if TYPE_CHECKING:
    import numpy as np
    from ray.actor import ActorHandle

    from mcore_rl.config.schema import Config
    from mcore_rl.data.transcripts import PromptSource
    from mcore_rl.megatron.checkpoint.writer import RankReport
    from mcore_rl.megatron.roles.rank_model import TrainedModel


@dataclass(frozen=True)
class SetUpContext:
    """Common arguments of set-ups.

    visible_devices: GPUs that the process may see; None: Ray has set them.
    loads_weights: rollout engines load model.hf_path; otherwise they wait for the first weight sync.
    gateways: with rollout.episode=gateway, by the memory of their host (Host.memory).
    """

    config: Config
    prompts: Mapping[str, Ref[PromptSource]]
    visible_devices: str | None = None
    loads_weights: bool = False
    gateways: Mapping[tuple[str, int], GatewayAddress] = field(default_factory=dict)

    def prepare_environment(self) -> None:
        """Hide the node's other GPUs from this process and place its compile caches, before torch is imported in it."""
        if self.visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible_devices
        if self.config.cluster.uses_cuda:
            use_node_directories()


class RunProcess:
    """Base of all processes."""

    def __init__(self, name: str, logs: str | None = None, peers: int | None = None) -> None:
        """Create the process without setting it up.

        logs: directory of its log file and stack dumps; None: Ray redirects the output, and there are no dumps.
        peers: number of processes that share the host's cores equally; None: the environment sets the threads.
        """
        if peers is not None:
            share_cores(peers)
        if logs is not None:
            write_output_to(Path(logs), name)
            write_stacks_to(stacks_file(Path(logs), name))
        self.name = name
        self.spans = SpanRecorder(name)
        self._producers: dict[str, ProcessHandle[Producer]] = {}
        # Before torch or an engine opens connections.
        meet_at(ray.util.get_node_ip_address())

    @remote_method(concurrency_group="watch")
    def watch(self) -> None:
        # Never returns: the driver learns of the death of this process from the failure of the call.
        threading.Event().wait()

    @remote_method(concurrency_group="watch")
    def where(self) -> tuple[Host, int]:
        """Return the host and the process id."""
        return this_host(), os.getpid()

    @remote_method(concurrency_group="watch")
    def seconds_stuck(self) -> float:
        """Return the seconds since the process's own work last made progress. Remote calls do not count as such
        work."""
        return 0.0

    @remote_method(concurrency_group="watch")
    def host_facts(self, paths: Mapping[str, str], mark: Path) -> HostFacts:
        return host_facts(paths, mark)

    @remote_method(concurrency_group="watch")
    def other_users(self) -> list[str]:
        """Return the names of other users who are logged in on this host."""
        return other_users()

    @remote_method(concurrency_group="watch")
    def pending_collectives(self) -> list[str]:
        """Return the collectives in which this process waits for its peers."""
        return pending_collectives()

    @remote_method(concurrency_group="watch")
    def request_stacks(self, pids: Sequence[int]) -> None:
        """Make processes of this host write their stacks (stack_requests.request_stacks)."""
        request_stacks(pids)

    @remote_method(concurrency_group="watch")
    def reading(self) -> Reading | None:
        """Return the load that this process has begun last."""
        return READS.current

    @remote_method(concurrency_group="watch")
    def free_address(self) -> str:
        """Return tcp://host:port that other hosts can reach. Another process may take the port before it is used."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"

    def drain_spans(self) -> list[Span]:
        return self.spans.drain()

    @remote_method(num_returns=2)
    def fetch(self, request: FetchRequest) -> tuple[None, TrajectoryBuffers]:
        """Fetch trajectories for this process and its peers. The first result is ready when they have arrived."""
        return self.fetched(request)

    def fetched(self, request: FetchRequest) -> tuple[None, TrajectoryBuffers]:
        with self.spans.span("fetch trajectories"):
            return None, fetch(request, self._producers)


class RankProcess(RunProcess):
    """One rank of a process group."""

    def setup(self, context: SetUpContext, rank: int, world_size: int, address: str) -> None:
        """Build the rank's model. The ranks meet at `address`."""
        context.prepare_environment()
        with self.spans.span("setup"):
            self._build(context, rank, world_size, address)

    def _build(self, context: SetUpContext, rank: int, world_size: int, address: str) -> None:
        raise NotImplementedError

    @remote_method(concurrency_group="pass_on")
    def pass_on(
        self, method: str, arguments: list[tuple[object, ...]], neighbours: list[ActorHandle] | None
    ) -> list[object]:
        """Call a method of all ranks of this node, including this one (see FanOut). Only the first call passes their
        handles."""
        if neighbours is not None:
            self._neighbours = neighbours
        return call_all(self._neighbours, method, arguments)

    def visible_devices(self) -> str:
        """Return the GPU that Ray assigned to this process, as in CUDA_VISIBLE_DEVICES."""
        return os.environ["CUDA_VISIBLE_DEVICES"]


class TrainedRankProcess(RankProcess):
    """One rank of a model that is trained: the actor or the critic. `role` is the rank's model."""

    role: TrainedModel

    def offload(self, parts: tuple[str, ...]) -> int:
        """Move parts of the state to host memory; returns the bytes of this rank in host memory."""
        return int(self.role.memory.offload(parts))

    def plan_save(self, directory: str, snapshot: bool) -> None:
        """Plan the checkpoint that `write_save` and `finish_save` write."""
        from mcore_rl.megatron.checkpoint.writer import CheckpointWriter

        with self.spans.span("plan save"):
            self._save = CheckpointWriter(directory, self.role, snapshot=snapshot)

    @remote_method(concurrency_group="save")
    def write_save(self) -> RankReport:
        """Write this rank's files, in a thread of its own while the main thread trains."""
        with self.spans.span("write save"):
            return self._save.write()

    @remote_method(concurrency_group="save")
    def finish_save(self, *reports: RankReport) -> SavedState:
        """Complete the checkpoint from the reports of all ranks; rank 0 only. Fails if write_save of a rank failed."""
        with self.spans.span("finish save"):
            return self._save.finish(reports)

    def load(self, directory: str, files: Sequence[SavedFile]) -> None:
        from mcore_rl.megatron.checkpoint.restore import load_checkpoint

        with self.spans.span("load"):
            load_checkpoint(directory, self.role, files)


def joined(columns: Sequence[TokenColumn]) -> dict[int, np.ndarray]:
    """Merge several columns into one dictionary by sample."""
    return {sample: values for column in columns for sample, values in column.by_sample().items()}


T = TypeVar("T")


class HeldBatch(Generic[T]):
    """Batch that a rank keeps between calls, under the driver's key; at most one."""

    def __init__(self) -> None:
        self._batches: dict[int, T] = {}

    def keep(self, key: int, batch: T) -> None:
        """Replace the held batch."""
        self._batches = {key: batch}

    def of(self, key: int) -> T:
        """Return the held batch.

        Raises: McoreRLError if it has another key.
        """
        if key not in self._batches:
            raise McoreRLError(f"batch {key} is not on this rank, which holds {next(iter(self._batches), 'none')}")
        return self._batches[key]

    def take(self, key: int) -> T:
        """Return the held batch and drop it."""
        batch = self.of(key)
        self._batches.clear()
        return batch
