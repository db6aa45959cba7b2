"""The process of one rank: waits for each stage's beginning, measures, answers."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import distributed as dist

from mcore_rl.doctor.checks import usable_cores
from mcore_rl.doctor.fabric.bench import PROBES, Bench, describe
from mcore_rl.doctor.fabric.board import Address, Board
from mcore_rl.doctor.fabric.plan import Fabric, Stage, stages
from mcore_rl.doctor.fabric.verdict import Answer

PATIENCE = 5
"""How many stage deadlines a rank waits, for the next stage or in a process group. More than the supervisors do, so
that a rank which hangs is known by its silence before those that wait for it raise or abort."""
ENVIRONMENT = {
    # A peer that is gone would make NCCL's watchdog abort the ranks that wait for it, and these be taken for the cause.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""For nodes that are all on this machine, whose name need not resolve; what the user has set stays."""

Hinder = Callable[[int, str], None]
"""Called with rank and stage inside the time of everything that is measured."""


def unhindered(rank: int, stage: str) -> None:
    """What a Hinder is outside of tests."""


@dataclass(frozen=True)
class Seat:
    """One rank's place in the test."""

    rank: int
    fabric: Fabric
    address: Address
    timeout_seconds: float


def run_rank(seat: Seat, hinder: Hinder) -> None:
    """The whole life of the process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # NCCL writes to stdout, which is the report's
    os.environ.update(ENVIRONMENT)
    for name, value in LOOPBACK.items() if seat.address.is_loopback() else ():
        os.environ.setdefault(name, value)
    torch.set_num_threads(max(1, usable_cores() // seat.fabric.slots))
    board = Board(seat.address, seat.timeout_seconds)
    bench = Bench(seat.fabric.device, seat.rank % seat.fabric.slots)
    for number, stage in enumerate(stages(seat.fabric)):
        board.wait(f"go {number}", PATIENCE * seat.timeout_seconds)
        bench.hinder = partial(hinder, seat.rank, stage.name)
        answer = _answer(seat, board, bench, number, stage)
        board.post(f"answer {number} {seat.rank}", json.dumps(asdict(answer)))
    board.wait("report", PATIENCE * seat.timeout_seconds)  # others may still be in the last stage


def _end_with_parent() -> None:
    """However the supervisor ended, nothing of the test stays; even while this rank waits in a collective."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(seat: Seat, board: Board, bench: Bench, number: int, stage: Stage) -> Answer:
    ranks = stage.group_of(seat.rank)
    try:
        # Not at the end of its stage: a rank that leaves while another still reads would break that one's collective.
        if dist.is_initialized():
            dist.destroy_process_group()
        if stage.groups and ranks is None:
            return Answer()
        if ranks is not None:
            board.join(
                f"{number} {ranks[0]}",
                ranks,
                seat.rank,
                backend="nccl" if bench.device.type == "cuda" else "gloo",
                timeout_seconds=PATIENCE * seat.timeout_seconds,
            )
        value = PROBES[stage.probe](bench)
        if number == 0 and seat.rank == 0:
            board.post("device", describe(bench.device.type))
        return Answer(value)
    except Exception as error:  # whatever a broken device or network raises is what the report is for
        lines = str(error).strip().splitlines()
        return Answer(error=f"{type(error).__name__}: {lines[0] if lines else ''}")
