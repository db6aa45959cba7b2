"""Process of one rank: runs the stages that its supervisor requests."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import distributed as dist

from mcore_rl.doctor.checks import usable_cores
from mcore_rl.doctor.fabric.bench import Bench, describe
from mcore_rl.doctor.fabric.plan import Fabric, Stage, stages
from mcore_rl.doctor.fabric.store import Address, connect
from mcore_rl.doctor.fabric.verdict import Result
from mcore_rl.parent_death import die_with

COLLECTIVE_TIMEOUTS = 5
"""Timeout of collectives in multiples of the stage timeout. Supervisors notice a silent rank first, before the ranks
that wait for it raise or abort."""
ENVIRONMENT = {
    # NCCL's watchdog would abort the ranks that wait for a lost peer, and the test would blame them.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Defaults for nodes simulated on one machine, whose host name may not resolve."""


@dataclass(frozen=True)
class RankSlot:
    """Arguments of a rank's process."""

    rank: int
    fabric: Fabric
    address: Address
    timeout_seconds: float


def run_rank(slot: RankSlot, supervisor: Connection) -> None:
    """Run the stages that the supervisor requests by number, and send their Results."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_with(parent.pid or 0)  # also while this rank waits in a collective
    os.dup2(2, 1)  # NCCL writes to stdout, which is reserved for the report
    os.environ.update(ENVIRONMENT)
    for name, value in LOOPBACK.items() if slot.address.is_loopback() else ():
        os.environ.setdefault(name, value)
    torch.set_num_threads(max(1, usable_cores() // slot.fabric.slots))
    bench = Bench(slot.fabric.device, slot.rank % slot.fabric.slots)
    plan = stages(slot.fabric)
    while True:
        number = supervisor.recv()
        supervisor.send(_run_stage(slot, bench, number, plan[number]))


def _run_stage(slot: RankSlot, bench: Bench, number: int, stage: Stage) -> Result:
    ranks = stage.group_of(slot.rank)
    assert ranks is not None
    try:
        # Not at the end of the previous stage: peers may still read from this rank then.
        if dist.is_initialized():
            dist.destroy_process_group()
        if len(ranks) > 1:
            dist.init_process_group(
                "nccl" if bench.device.type == "cuda" else "gloo",
                store=dist.PrefixStore(f"{number} {ranks[0]}", connect(slot.address, slot.timeout_seconds)),
                rank=ranks.index(slot.rank),
                world_size=len(ranks),
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUTS * slot.timeout_seconds),
            )
        return Result(stage.probe(bench), device=describe(bench.device.type))
    except Exception as error:  # any error of a broken device or network belongs in the report
        lines = str(error).strip().splitlines()
        return Result(error=f"{type(error).__name__}: {lines[0] if lines else ''}")
