"""Supervisor of one node: starts the node's ranks and leads them through the stages.

Every wait has a deadline, and no rank outlives its supervisor.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.context import SpawnProcess

from mcore_rl.doctor.fabric.bench import num_slots
from mcore_rl.doctor.fabric.plan import Fabric, Stage, stages
from mcore_rl.doctor.fabric.rank import RankSlot, run_rank
from mcore_rl.doctor.fabric.report import Report
from mcore_rl.doctor.fabric.store import Address, Exchange
from mcore_rl.doctor.fabric.verdict import (
    Offer,
    Result,
    figures_of,
    find_failures,
    find_slow,
    plan_fabric,
)

START_TIMEOUTS = 3
"""Timeout of the rendezvous and of the first stage, in multiples of the stage timeout: both load torch, possibly from
a slow disk."""
EXCHANGE_SECONDS = 10.0
"""Time for the exchange of results between supervisors, in addition to the stage timeout."""
KILL_SECONDS = 10.0
"""Time that killed ranks may take to exit."""
RankMain = Callable[[RankSlot, connection.Connection], None]


@dataclass(frozen=True)
class Place:
    """Index of this node and the address of the store.

    listener: socket from store.listen(), on node 0.
    hosts: names of all nodes, if known in advance.
    """

    index: int
    num_nodes: int
    host: str
    address: Address
    listener: socket.socket | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Timeout of a stage, and the percentage of the others' median below which a value is slow."""

    timeout_seconds: float = 120
    slow_percent: float = 80


def supervise(place: Place, slots: int | None, limits: Limits, rank_main: RankMain = run_rank) -> Report:
    """Run the test and return its report, which is the same on every node.

    slots: ranks per node; None: all GPUs.
    rank_main: main function of the ranks; tests inject faults with it.
    Collective: all nodes.
    Raises: McoreRLError if node 0 is not reachable.
    """
    seconds = START_TIMEOUTS * limits.timeout_seconds
    exchange = Exchange(place.address, place.index, place.num_nodes, seconds, place.listener)
    notes = exchange.gather("offer", json.dumps(Offer(place.host, *num_slots(slots))), seconds)
    offers = {node: Offer(*json.loads(note)) for node, note in enumerate(notes) if note}
    names = place.hosts or [f"node {node}" for node in range(place.num_nodes)]
    hosts = [offers[node].host if node in offers else name for node, name in enumerate(names)]
    fabric, problems = plan_fabric(offers, hosts, slots, seconds)
    report = Report(fabric, fabric.device, [], problems)
    if not problems:
        with _Ranks(fabric, place, limits, rank_main) as ranks:
            report = _run_stages(ranks, exchange, fabric, limits)
    exchange.close(EXCHANGE_SECONDS)
    return report


def _run_stages(ranks: _Ranks, exchange: Exchange, fabric: Fabric, limits: Limits) -> Report:
    """Run the stages in order, up to the first one that fails: later ones could wait for its failed ranks."""
    report = Report(fabric, fabric.device, [], [])
    plan = stages(fabric)
    for number, stage in enumerate(plan):
        timeout = limits.timeout_seconds * (1 if number else START_TIMEOUTS)
        own_results = ranks.run_stage(number, stage, timeout)
        notes = exchange.gather(f"stage {number}", json.dumps(own_results), timeout + EXCHANGE_SECONDS)
        results = {int(rank): Result(*result) for note in notes if note for rank, result in json.loads(note).items()}
        if 0 in results and results[0].device:
            report = replace(report, device=results[0].device)
        report.figures.extend(figures_of(stage, results))
        report.problems.extend(find_failures(stage, fabric, results, timeout))
        if report.problems:
            break
    for stage in {stage.name: stage for stage in plan}.values():
        report.problems.extend(find_slow(stage, report.figures, fabric, limits.slow_percent))
    return report


class _Ranks:
    """Processes of this node's ranks, killed at the end of the block."""

    def __init__(self, fabric: Fabric, place: Place, limits: Limits, rank_main: RankMain) -> None:
        self._ranks: dict[connection.Connection, tuple[int, SpawnProcess]] = {}
        context = multiprocessing.get_context("spawn")
        for rank in fabric.ranks_of(place.index):
            ours, theirs = context.Pipe()
            slot = RankSlot(rank, fabric, place.address, limits.timeout_seconds)
            process = context.Process(target=rank_main, args=(slot, theirs), daemon=True)
            process.start()
            theirs.close()  # so that our end reads EOF when the rank dies
            self._ranks[ours] = rank, process

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, process in self._ranks.values():
            process.kill()
        deadline = time.monotonic() + KILL_SECONDS
        for pipe, (_, process) in self._ranks.items():
            process.join(max(0.0, deadline - time.monotonic()))  # a process that hangs in a driver cannot be killed
            pipe.close()

    def run_stage(self, number: int, stage: Stage, timeout_seconds: float) -> dict[int, Result]:
        """Run one stage. Ranks that are idle or miss the deadline have no result."""
        deadline = time.monotonic() + timeout_seconds
        results: dict[int, Result] = {}
        pending = [pipe for pipe, (rank, _) in self._ranks.items() if stage.group_of(rank)]
        for pipe in pending:
            with suppress(OSError):  # the rank died; reading from its pipe shows that
                pipe.send(number)
        while pending and time.monotonic() < deadline:
            ready = connection.wait(pending, deadline - time.monotonic())
            for pipe in [pipe for pipe in pending if pipe in ready]:
                pending.remove(pipe)
                rank, process = self._ranks[pipe]
                try:
                    results[rank] = pipe.recv()
                except (EOFError, OSError):
                    results[rank] = Result(error=_death(process), died=True)
        return results


def _death(process: SpawnProcess) -> str:
    process.join(KILL_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        return f"its process died of {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
