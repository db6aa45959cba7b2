"""Complete weight sync in one process: threads stand for the processes, with real sockets and shared memory."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.weights.connection import Connection, TrainerSetup, connect_engine_rank
from mcore_rl.weights.quantization import TensorBox
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.send import WeightSender
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.hosts import Host
from mcore_rl.weights.transports.link import open_store
from mcore_rl.weights.transports.topology import Endpoint, Topology
from model_converters.mapping.layout import TrainLayout
from tests.unit.weights.delivery import Taken, Tensors

TIMEOUT_SECONDS = 20
SHORT_TIMEOUT_SECONDS = 8
"""For tests that wait for a silent peer; long enough to connect on a busy machine."""


def on_host(name: str) -> Endpoint:
    """Return the endpoint of a process on a simulated host; `A0` has the first GPU of host A."""
    return Endpoint(Host(name[0], (name[0], 0)), "127.0.0.1", name if name[1:] else "")


def sync_plan(
    config: dict[str, Any],
    train_layout: TrainLayout,
    engine_layout: EngineLayout,
    trainers: str,
    engines: str,
    *,
    bucket_bytes: int = 20_000,
    num_slots: int = 2,
    transport: str = "auto",
    delta: bool = False,
) -> SyncPlan:
    """Plan a sync. `trainers`, `engines`: the host of each rank as letters (`AAB`), or with GPUs (`A0 A1 B0`)."""
    of_trainers, of_engines = (
        tuple(map(on_host, hosts.split() if " " in hosts or hosts[1:].isdigit() else hosts))
        for hosts in (trainers, engines)
    )
    topology = Topology(of_trainers, of_engines, engine_layout.num_ranks, transport, delta)
    return SyncPlan(config, torch.float32, train_layout, engine_layout, topology, bucket_bytes, num_slots)


@dataclass
class Processes:
    """Connected trainer ranks and engine ranks."""

    plan: SyncPlan
    setups: list[TrainerSetup]
    senders: list[WeightSender]
    receivers: list[SliceReceiver]


@contextmanager
def connected(
    plan: SyncPlan,
    store: dist.TCPStore,
    generation: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
    folder: str | None = None,
) -> Iterator[Processes]:
    """Connect all processes of a plan. `timeout_seconds`: of connecting and of every wait afterwards. `folder`: of the
    connection's files."""
    setups = [TrainerSetup(plan, rank) for rank in range(len(plan.topology.trainers))]
    try:
        segments = {number: name for setup in setups for number, name in setup.create_buffers().items()}
        rendezvous = Rendezvous("127.0.0.1", store.port, generation)
        connection = Connection(plan, rendezvous, segments, timeout_seconds, folder)
        engine_ranks = range(len(plan.topology.engines))
        calls: list[Callable[[], Any]] = [partial(setup.connect, connection) for setup in setups]
        calls += [partial(connect_engine_rank, connection, rank) for rank in engine_ranks]
        connected_ranks = at_once(calls)
    finally:
        for setup in setups:
            setup.unlink()
    yield Processes(plan, setups, connected_ranks[: len(setups)], connected_ranks[len(setups) :])


def fork_server() -> ForkServerContext:
    """Return a context whose processes fork from a server that has imported torch and this module. This process may
    have threads of earlier tests, and a fork of it would copy the locks that they hold."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # no effect if the server runs already
    return context


def store() -> dist.TCPStore:
    return open_store("127.0.0.1")


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls that wait for each other in threads. Returns their results, or raises the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def receive_digests(processes: Processes, held: Sequence[Tensors]) -> list[list[tuple[TensorBox, bytes]]]:
    """Return the digests that each engine rank receives of the tensors `held` by the trainer ranks."""
    calls: list[Callable[[], Any]] = [receiver.digests for receiver in processes.receivers]
    calls += [partial(sender.send_digests, own) for sender, own in zip(processes.senders, held, strict=True)]
    return at_once(calls)[: len(processes.receivers)]


def update(
    processes: Processes, held: Sequence[Tensors], first_round: int = 0
) -> tuple[list[Taken], list[int], list[Any]]:
    """Run one update, from `first_round` on, of the tensors `held` by the trainer ranks.

    Returns the boxes that each engine rank received, the bytes that it received, and the bytes that each trainer rank
    sent to each buffer.
    """
    taken: list[Taken] = [{} for _ in processes.receivers]
    lock = threading.Lock()

    def receive(rank: int) -> int:
        receiver = processes.receivers[rank]

        def put(name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
            with lock:
                taken[rank].setdefault(name, []).append((start, box.clone()))

        receiver.begin(first_round)
        num_bytes = sum(receiver.receive(sync_round, put) for sync_round in range(first_round, receiver.num_rounds))
        receiver.finish()
        return num_bytes

    calls: list[Callable[[], Any]] = [partial(receive, rank) for rank in range(len(taken))]
    calls += [
        partial(sender.send, own, first_round=first_round) for sender, own in zip(processes.senders, held, strict=True)
    ]
    results = at_once(calls)
    return taken, results[: len(taken)], results[len(taken) :]
