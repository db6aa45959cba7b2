"""Real weight sync between trainer and engine processes, with random weights and engines that only keep tensors."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch

from benchmarks.children import PipedChild
from benchmarks.conversion import convert
from benchmarks.sync.adam import Adam
from benchmarks.sync.limited_link import enter
from mcore_rl.types.json import JsonObject
from mcore_rl.weights.connection import Connection, TrainerSetup, connect_engine_rank
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.tensor_parts import part_of
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.hosts import Host
from mcore_rl.weights.transports.link import open_store
from mcore_rl.weights.transports.topology import Endpoint, Topology
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import local_shapes

TIMEOUT_SECONDS = 120.0
"""Timeout of the transports, which start under full load of this machine."""
CONFIG: JsonObject = {
    **convert.CONFIG,
    "vocab_size": 1024,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}
"""270 million parameters."""


def sync_plan(
    train_layout: TrainLayout,
    engine_layout: EngineLayout,
    hosts: tuple[str, str],
    *,
    bucket_mib: float,
    num_slots: int = 2,
    layers: int | None = None,
    config: JsonObject = CONFIG,
    addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
    delta: bool = False,
) -> SyncPlan:
    """Create a plan. `hosts`: one letter per trainer rank, and one per engine rank; processes with the same letter
    share memory. `layers`: number of layers; None: as in `config`. `addresses`: of trainers and of engines."""
    trainers, engines = (
        tuple(Endpoint(Host(each, (each, 0)), address) for each in letters)
        for letters, address in zip(hosts, addresses, strict=True)
    )
    topology = Topology(trainers, engines, engine_layout.num_ranks, delta=delta)
    config = config if layers is None else config | {"num_hidden_layers": layers}
    return SyncPlan(config, torch.bfloat16, train_layout, engine_layout, topology, int(bucket_mib * 2**20), num_slots)


@dataclass
class SyncProcesses:
    """Connected processes of a sync."""

    plan: SyncPlan
    trainers: list[PipedChild]
    engines: list[PipedChild]

    def update(self) -> tuple[float, list[int]]:
        """Run one update. Returns its seconds and the bytes received by each engine rank."""
        started = time.perf_counter()
        # Engines first, so that they are ready when the first bucket arrives.
        for pipe in (*self.engines, *self.trainers):
            pipe.send("update")
        received = [pipe.recv(int) for pipe in self.engines]
        for pipe in self.trainers:
            pipe.recv(str)
        return time.perf_counter() - started, received

    def train(self, num_updates: int) -> None:
        """Run updates of the trainers' optimizers."""
        for pipe in self.trainers:
            pipe.send(num_updates)
        for pipe in self.trainers:
            pipe.recv(str)

    def digests(self) -> list[dict[str, str]]:
        """Return digests by HF name for each process: sent tensors of trainers, then received tensors of engines."""
        for pipe in (*self.trainers, *self.engines):
            pipe.send("digests")
        return [pipe.recv(dict) for pipe in (*self.trainers, *self.engines)]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one update sends to all staging buffers."""
        return sum(
            incoming.num_bytes for incoming in self.plan.incoming(range(len(self.plan.topology.buffers))).values()
        )


@contextmanager
def processes(
    plan: SyncPlan,
    *,
    device: str = "cpu",
    keep: bool = True,
    pinned: bool = False,
    adam_lr: float | None = None,
    engine_network: Path | None = None,
) -> Iterator[SyncProcesses]:
    """Start and connect the processes of a sync. keep: engine ranks copy received slices to their own tensors; these
    and the trainers' tensors are on `device`. pinned: the staging buffers are registered with CUDA.
    adam_lr: learning rate of SyncProcesses.train; None: weights stay. engine_network: network namespace of engines."""
    address = plan.topology.trainers[0].address
    store = open_store(address)  # must live as long as the processes
    with ExitStack() as stack:

        def start(target: Callable[..., None], rank: int, *arguments: object) -> PipedChild:
            child = PipedChild(target, plan, rank, device, *arguments)
            stack.callback(child.end)
            return child

        trainers = [start(_trainer, rank, pinned, adam_lr) for rank in range(len(plan.topology.trainers))]
        engines = [start(_engine, rank, keep, engine_network) for rank in range(len(plan.topology.engines))]
        # Each trainer rank owns some of the staging buffers.
        segments = {number: name for pipe in trainers for number, name in pipe.recv(dict).items()}
        rendezvous = Rendezvous(address, store.port, 0)
        for pipe in (*trainers, *engines):
            pipe.send(Connection(plan, rendezvous, segments, TIMEOUT_SECONDS))
        for pipe in (*trainers, *engines):
            assert pipe.recv(str) == "connected"
        # Only now: a process maps a segment by its name.
        for pipe in trainers:
            pipe.send("unlink")
        yield SyncProcesses(plan, trainers, engines)


def _trainer(pipe: Pipe, plan: SyncPlan, rank: int, device: str, pinned: bool, adam_lr: float | None) -> None:
    torch.set_num_threads(1)
    end = TrainerSetup(plan, rank)
    pipe.send(end.create_buffers())
    sender = end.connect(pipe.recv())
    shapes = local_shapes(plan.rows, plan.train_layout, rank)
    tensors = {name: _random(name, shape, plan.dtype, device) for name, shape in shapes.items()}
    adam = None if adam_lr is None else Adam(tensors, adam_lr)
    if pinned:  # the driver copies pageable memory through a small pinned buffer
        for shared in end._owned.values():
            memory = shared.segment.memory
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    pipe.send("connected")
    while (word := pipe.recv()) is not None:
        if word == "unlink":
            end.unlink()
        elif word == "update":
            sender.send(tensors)
            pipe.send("sent")
        elif isinstance(word, int):
            assert adam is not None
            adam.update(word)
            pipe.send("trained")
        else:
            pipe.send(_sent_digests(plan, rank, tensors))


def _sent_digests(plan: SyncPlan, rank: int, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return digests by HF name of full-size tensors with the parts that this rank sends, zero elsewhere."""
    whole: dict[str, torch.Tensor] = {}
    messages = [message for of_round in plan.outgoing(rank).values() for message in of_round]
    for each in (each for message in messages for each in message.slices):
        tensor = whole.setdefault(each.hf_name, torch.zeros(each.hf_shape, dtype=each.dtype))
        tensor.narrow(each.dim, each.start, each.length).copy_(part_of(each, tensors, each.shape))
    return {name: _digest(tensor) for name, tensor in whole.items()}


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return random values that depend on the name only, so that replicas are equal."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _engine(pipe: Pipe, plan: SyncPlan, rank: int, device: str, keep: bool, network: Path | None) -> None:
    torch.set_num_threads(1)
    if network is not None:
        enter(network)
    receiver = connect_engine_rank(pipe.recv(), rank)
    boxes = ShardMap(plan.rows, plan.engine_layout).boxes(rank % plan.engine_layout.num_ranks)
    held = {name: torch.zeros(size, dtype=plan.dtype, device=device) for name, ((_, size),) in boxes.items()}

    def put(name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
        if keep:
            first = boxes[name][0][0]
            # `held` has this rank's box of the tensor; a message has a part of that box.
            places = zip(start, first, box.shape, strict=True)
            held[name][tuple(slice(a - b, a - b + n) for a, b, n in places)].copy_(box)

    pipe.send("connected")
    while (word := pipe.recv()) is not None:
        if word == "update":
            receiver.begin()
            num_bytes = sum(receiver.receive(sync_round, put) for sync_round in range(receiver.num_rounds))
            receiver.finish()
            pipe.send(num_bytes)
        else:
            pipe.send({name: _digest(tensor) for name, tensor in held.items()})


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.cpu().contiguous().view(torch.uint8).numpy(), digest_size=16).hexdigest()
