"""Weight sync between hosts, compared with a raw socket copy of the same bytes.

Both use loopback between two processes. Bytes are counted at the receiver.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection as Pipe

import torch

from benchmarks.children import PipedChild
from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.sync.processes import processes, sync_plan
from benchmarks.timing import seconds_of
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.routes import RouteMap
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.slices.totals import count
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement

ROUNDS = size(7, 1)
BUCKET_MIB = 64.0
LAYOUTS = {
    "TP2 -> TP1": (TrainLayout(2, tp=2), EngineLayout(), ("AA", "B")),
    "EP2 -> TP2": (TrainLayout(2, ep=2), EngineLayout(tp=2), ("AB", "AB")),
    "PP2 -> whole experts on 2": (TrainLayout(2, pp=2), EngineLayout(tp=2, expert_parallel=True), ("AA", "BB")),
    "DP2 -> 2 engines": (TrainLayout(2), EngineLayout(), ("AB", "CD")),
}
"""Layout of the trainer, layout of the engine, and host of each rank."""


def run() -> list[Result]:
    torch.set_num_threads(1)
    plan = sync_plan(TrainLayout(1), EngineLayout(), ("A", "B"), bucket_mib=BUCKET_MIB)
    with processes(plan, keep=False) as sync, raw_socket(sync.sent_bytes) as raw:
        sync.update()
        raw()
        pairs = [(seconds_of(raw), sync.update()[0]) for _ in range(ROUNDS)]
        num_bytes = sync.sent_bytes
    ratio = statistics.median(limit / seconds for limit, seconds in pairs)
    rate = num_bytes / statistics.median(seconds for _, seconds in pairs) / 1e9
    title = f"gloo, {num_bytes / 2**20:.0f} MiB in {plan.num_rounds} buckets, beside a raw socket"
    results = [Result(title, rate, rate / ratio, "GB/s", ratio, ">= 0.8")]
    for name, (train_layout, engine_layout, hosts) in LAYOUTS.items():
        results.append(_counted(name, train_layout, engine_layout, hosts))
    return results


def _counted(name: str, train_layout: TrainLayout, engine_layout: EngineLayout, hosts: tuple[str, str]) -> Result:
    """Compare the bytes received by the fullest engine rank, including alignment, with the bytes of its tensors."""
    plan = sync_plan(train_layout, engine_layout, hosts, bucket_mib=BUCKET_MIB, layers=2)
    with processes(plan, keep=False) as sync:
        _, received = sync.update()
    needs = ShardMap(plan.rows, engine_layout)
    totals = count(RouteMap(Placement(plan.rows, train_layout), needs, plan.topology.locations), plan.bucket_bytes)
    # Alignment of slices in a bucket adds some bytes.
    ratios = [n / totals.needed[rank % engine_layout.num_ranks] for rank, n in enumerate(received)]
    fullest = max(range(len(received)), key=ratios.__getitem__)
    floor = float(totals.needed[fullest % engine_layout.num_ranks])
    title = f"bytes of an engine rank, {name}, beside its floor"
    return Result(title, received[fullest] / 1e6, floor / 1e6, "MB", ratios[fullest], "<= 1.05")


@contextmanager
def raw_socket(num_bytes: int) -> Iterator[Callable[[], object]]:
    """Yield a function that sends bytes to another process and returns when all have arrived."""
    source = torch.ones(num_bytes, dtype=torch.uint8).numpy()
    child = PipedChild(_take, num_bytes)
    try:
        with closing(socket.create_connection(("127.0.0.1", child.recv(int)))) as connection:

            def send() -> None:
                connection.sendall(memoryview(source))
                child.recv(str)

            yield send
    finally:
        child.end()


def _take(pipe: Pipe, num_bytes: int) -> None:
    target = memoryview(torch.zeros(num_bytes, dtype=torch.uint8).numpy())
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
    while True:
        taken = 0
        while taken < num_bytes:
            # Into the same memory each time, like a staging buffer.
            received = connection.recv_into(target[taken:], 0)
            if not received:
                return
            taken += received
        pipe.send("all")
