"""Weight sync of two expert-parallel ranks on two hosts with an engine on each host. Every engine needs the whole
model, but a rank has only half of the experts. Peers, with as many processes: mbridge's export of the same model, which
gathers the experts tensor by tensor, and a point-to-point exchange of only the missing bytes.

Besides these bytes, which the kernel copies into and out of a socket, a sync copies every slice into a staging buffer
(from where it also goes to the other host) and out of it, into the engine's tensors. The last rows have the processor
time of each of these copies.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from benchmarks.children import PipedChild
from benchmarks.conversion import convert
from benchmarks.conversion.mbridge import MBridgePeer, allocate, initialize, require_mbridge
from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.sync.processes import SyncProcesses, processes, sync_plan
from benchmarks.timing import alternating, seconds_of
from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_plan, local_shapes

ROUNDS = size(7, 1)
LAYOUT = TrainLayout(2, ep=2)


def run() -> list[Result]:
    torch.set_num_threads(1)
    require_mbridge()
    plan = sync_plan(LAYOUT, EngineLayout(), ("AB", "AB"), bucket_mib=64.0, config=convert.CONFIG)
    with tempfile.TemporaryDirectory(prefix="mcore_rl_refit_") as directory:
        convert.write_source(Path(directory) / "hf")  # mbridge reads config.json there
        with (
            processes(plan, keep=True) as sync,
            _pair(_export, directory) as export,
            _pair(_missing, directory) as missing,
        ):
            actions: list[Callable[[], object]] = [sync.update, export, missing]
            alternating(actions, 1)  # the first calls connect the process groups and touch all pages
            groups = (sync.trainers, sync.engines, missing.children)
            before = [_processor_times(each) for each in groups]
            times = alternating(actions, ROUNDS)
            used = [(_processor_times(each) - then) / ROUNDS for each, then in zip(groups, before, strict=True)]
    ours, theirs, floor = map(statistics.median, times)
    faster = statistics.median(theirs / ours for ours, theirs, _ in zip(*times, strict=True))
    over = statistics.median(ours / floor for ours, _, floor in zip(*times, strict=True))
    num_bytes = sync.sent_bytes / 2  # two engines
    return [
        Result(f"{num_bytes / 1e6:.0f} MB to each engine, beside mbridge's export", ours, theirs, "s", faster, ">= 3"),
        Result("the same, beside the bytes that a host lacks", ours, floor, "s", over, "<= 1.9"),
        *_copies(sync, *used),
    ]


def _copies(sync: SyncProcesses, trainers: Times, engines: Times, missing: Times) -> list[Result]:
    """Report the processor time of each copy of an update, summed over both hosts. The limit of copies within a host is
    a memcpy on an idle machine, the limit of copies between hosts is the time of the missing bytes alone."""
    messages = [each for rank in range(LAYOUT.world_size) for each in chain(*sync.plan.outgoing(rank).values())]
    buffers = sync.plan.topology.buffers
    packed = sum(each.num_bytes for each in messages if each.sender in buffers[each.receiver].writers)
    source, target = (torch.ones(2**28, dtype=torch.uint8) for _ in range(2))
    rate = source.numel() / statistics.median(seconds_of(lambda: target.copy_(source)) for _ in range(ROUNDS))
    rows = (
        (f"{packed / 1e6:.0f} MB from parameters into staging buffers", trainers.user, packed / rate),
        (f"{(sync.sent_bytes - packed) / 1e6:.0f} MB into and out of sockets", trainers.system, missing.system),
        (f"{sync.sent_bytes / 1e6:.0f} MB from staging buffers to engines", engines.user, sync.sent_bytes / rate),
    )
    return [Result(f"processor time, {name}", ours, limit, "s", ours / limit, "") for name, ours, limit in rows]


@dataclass(frozen=True)
class Times:
    """Processor time in seconds."""

    user: float
    system: float

    def __sub__(self, other: Times) -> Times:
        return Times(self.user - other.user, self.system - other.system)

    def __truediv__(self, number: int) -> Times:
        return Times(self.user / number, self.system / number)


def _processor_times(children: Sequence[PipedChild]) -> Times:
    """Return the processor time that these processes have used together since their start."""
    times = [psutil.Process(child.pid).cpu_times() for child in children]
    return Times(sum(each.user for each in times), sum(each.system for each in times))


@dataclass(frozen=True)
class _Pair:
    """Two processes that run in parallel on each call."""

    children: list[PipedChild]

    def __call__(self) -> None:
        for child in self.children:
            child.send(True)
        for child in self.children:
            child.recv(str)


@contextmanager
def _pair(target: Callable[[Pipe, int, str], None], directory: str) -> Iterator[_Pair]:
    """Start two processes that run `target`."""
    with ExitStack() as stack:
        children = [PipedChild(target, rank, directory) for rank in range(LAYOUT.world_size)]
        for child in children:
            stack.callback(child.end, False)
        yield _Pair(children)


def _export(pipe: Pipe, rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    initialize(LAYOUT, rank, f"file://{directory}/export")
    peer = MBridgePeer(Path(directory) / "hf", allocate(LAYOUT, rank))
    total = sum(torch.Size(tensor.shape).numel() for tensor in export_plan(convert.bound_rows(), TrainLayout(1)))
    target = torch.ones(total, dtype=torch.bfloat16)
    while pipe.recv():
        peer.export(target)
        pipe.send("done")


def _missing(pipe: Pipe, rank: int, directory: str) -> None:
    """Exchange the experts of both ranks at the same time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/missing", rank=rank, world_size=2)
    rows = convert.bound_rows()
    held = [
        torch.Size(shape).numel() for name, shape in local_shapes(rows, LAYOUT, rank).items() if ".experts." in name
    ]
    source = torch.ones(sum(held), dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    while pipe.recv():
        for work in (dist.isend(source, 1 - rank), dist.irecv(target, 1 - rank)):
            assert work is not None
            work.wait()
        pipe.send("done")
