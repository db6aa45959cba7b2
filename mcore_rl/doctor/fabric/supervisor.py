"""Supervisor of one node: starts a process per rank, and gathers the results of all ranks stage by stage.

Every wait has a deadline, and no rank outlives its supervisor.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

import torch
from torch import distributed as dist

from mcore_rl.doctor.checks import usable_cores
from mcore_rl.doctor.fabric.bench import Bench, describe, num_slots
from mcore_rl.doctor.fabric.plan import Fabric, StageResult, result_key, stage_key, stages
from mcore_rl.doctor.fabric.rendezvous import Address, NodePlace, connect, is_loopback
from mcore_rl.doctor.fabric.report import FabricProblem, FabricReport, figures_of, find_failures, find_slow
from mcore_rl.errors import McoreRLError
from mcore_rl.parent_death import die_with

START_TIMEOUTS = 3
"""Timeout of the rendezvous and of the first stage, in multiples of the stage timeout: both load torch, possibly from
a slow disk."""
END_SECONDS = 10.0
"""Time that killed ranks may take to exit, and that node 0 keeps the store for the other nodes."""
POLL_SECONDS = 0.1
"""Interval of checks. TCPStore.wait cannot be used: it raises if one key is late, without naming the keys that arrived.
"""
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
RankMain = Callable[[int, Fabric, Address, float], None]


def run_rank(rank: int, fabric: Fabric, address: Address, timeout_seconds: float) -> None:
    """Run the stages. A stage starts when node 0 has published the results of the previous one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_with(parent.pid or 0)  # also while this rank waits in a collective
    os.dup2(2, 1)  # NCCL writes to stdout, which is reserved for the report
    os.environ.update(ENVIRONMENT)
    for name, value in LOOPBACK.items() if is_loopback(address.host) else ():
        os.environ.setdefault(name, value)
    torch.set_num_threads(max(1, usable_cores() // fabric.slots))
    bench = Bench(fabric.device, rank % fabric.slots)
    # Longer than any stage: a rank that is done waits here for the slowest one, and would be blamed if it raised.
    store = connect(address, COLLECTIVE_TIMEOUTS * timeout_seconds)
    for number, stage in enumerate(stages(fabric)):
        ranks = stage.group_of(rank)
        if ranks is not None:
            try:
                _join(ranks, rank, f"{number} {ranks[0]}", bench.device.type, address, timeout_seconds)
                result = StageResult(stage.probe(bench), device=describe(bench.device.type))
            except Exception as error:  # any error of a broken device or network belongs in the report
                lines = str(error).strip().splitlines()
                result = StageResult(error=f"{type(error).__name__}: {lines[0] if lines else ''}")
            store.set(result_key(number, rank), json.dumps(result))
        store.wait([stage_key(number)])


def _join(
    ranks: tuple[int, ...], rank: int, prefix: str, device: str, address: Address, timeout_seconds: float
) -> None:
    """Replace the process group by a group of these ranks; none for a single rank."""
    # Not at the end of the previous stage: peers may still read from this rank then.
    if dist.is_initialized():
        dist.destroy_process_group()
    if len(ranks) > 1:
        # A client of its own: NCCL's threads use it while the main thread waits on the other one.
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore(prefix, connect(address, timeout_seconds)),
            rank=ranks.index(rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUTS * timeout_seconds),
        )


class Offer(NamedTuple):
    """Name of a node, kind of its devices (cuda or cpu), and their number."""

    host: str
    device: str
    slots: int


def supervise(
    place: NodePlace, slots: int | None, timeout_seconds: float, slow_percent: float, rank_main: RankMain = run_rank
) -> FabricReport:
    """Run the test and return its report, which is the same on every node.

    slots: ranks per node; None: all GPUs.
    timeout_seconds: timeout of a stage.
    slow_percent: a value below this percentage of the others' median is slow.
    rank_main: main function of the ranks; tests inject faults with it.
    Collective: all nodes.
    Raises: McoreRLError if node 0 is not reachable.
    """
    seconds = START_TIMEOUTS * timeout_seconds
    try:
        store = connect(place.address, seconds, place.listener)
        store.set(f"offer {place.index}", json.dumps(Offer(place.host, *num_slots(slots))))
        keys = [f"offer {node}" for node in range(place.num_nodes)]
        notes = _gather(store, place.index, "offers", keys, seconds)
        offers = {node: Offer(*json.loads(note)) for node, note in enumerate(notes) if note}
        names = place.hosts or [f"node {node}" for node in range(place.num_nodes)]
        hosts = [offers[node].host if node in offers else name for node, name in enumerate(names)]
        fabric, problems = plan_fabric(offers, hosts, slots, seconds)
        report = FabricReport(fabric, fabric.device, [], problems)
        if not problems:
            with _started(fabric, place, timeout_seconds, rank_main) as ranks:
                _run_stages(store, place.index, ranks, report, timeout_seconds)
            for figures in report.by_stage().values():
                report.problems.extend(find_slow(figures, fabric, slow_percent))
        # The store ends with node 0's process, so node 0 leaves last.
        store.set(f"done {place.index}", "")
        if place.index == 0:
            _wait(store, [f"done {node}" for node in range(place.num_nodes)], END_SECONDS)
    except dist.DistError as error:
        raise McoreRLError(
            f"node 0 of the fabric test does not answer at {place.address} (waited {seconds:g} s): start "
            "the test on every node, with an address of node 0 that all of them reach"
        ) from error
    return report


def plan_fabric(
    offers: Mapping[int, Offer], hosts: Sequence[str], slots: int | None, timeout_seconds: float
) -> tuple[Fabric, list[FabricProblem]]:
    """Return the fabric under test and the nodes that are absent or lack devices.

    hosts: names of all nodes.
    slots: devices per node; None: the highest number that a node offers.
    """
    # A node whose driver is broken offers a CPU: it is reported as a node that lacks GPUs.
    device = "cuda" if any(offer.device == "cuda" for offer in offers.values()) else "cpu"
    expected = slots or max(offer.slots for offer in offers.values() if offer.device == device)
    if len(set(hosts)) < len(hosts):  # nodes simulated on one machine
        hosts = [f"{host}/{node}" for node, host in enumerate(hosts)]
    problems = []
    for node, host in enumerate(hosts):
        offer = offers.get(node)
        if offer is None:
            reason = f"did not join within {timeout_seconds:g} s"
        elif (offer.device, offer.slots) != (device, expected):
            reason = f"has {offer.slots} {offer.device} slots, not {expected} of {device}"
        else:
            continue
        problems.append(FabricProblem("failing", "meeting", host, reason, (), (host,)))
    return Fabric(tuple(hosts), expected, device), problems


def _run_stages(
    store: dist.Store, node: int, ranks: Mapping[int, SpawnProcess], report: FabricReport, timeout_seconds: float
) -> None:
    """Add the stages to the report, up to the first one that fails: later ones could wait for its failed ranks."""
    for number, stage in enumerate(stages(report.fabric)):
        timeout = timeout_seconds * (1 if number else START_TIMEOUTS)
        members = [rank for group in stage.groups for rank in group]
        keys = [result_key(number, rank) for rank in members]
        notes = _gather(store, node, stage_key(number), keys, timeout, partial(_note_deaths, store, number, ranks))
        results = {rank: StageResult(*json.loads(note)) for rank, note in zip(members, notes, strict=True) if note}
        if 0 in results and results[0].device:
            report.device = results[0].device
        report.figures.extend(figures_of(stage, results))
        report.problems.extend(find_failures(stage, report.fabric, results, timeout))
        if report.problems:
            return


def _gather(
    store: dist.Store,
    node: int,
    name: str,
    keys: Sequence[str],
    timeout_seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[str | None]:
    """Gather the values of the keys; None for a key that is absent at node 0's deadline.

    Node 0 publishes the list as `name`, so the result is the same on every node.
    """
    if node == 0:
        # The list starts the next stage on all ranks, also after a failure. Their supervisors then kill them.
        _wait(store, keys, timeout_seconds, meanwhile)
        store.set(name, json.dumps([store.get(key).decode() if store.check([key]) else None for key in keys]))
    else:
        # Node 0 can start to wait as late as the deadline of this node.
        _wait(store, [name], 3 * timeout_seconds, meanwhile)
    notes: list[str | None] = json.loads(store.get(name))
    return notes


def _wait(
    store: dist.Store, keys: Sequence[str], timeout_seconds: float, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Wait until the store has all keys or the time is over; call `meanwhile` between checks."""
    deadline = time.monotonic() + timeout_seconds
    while not store.check(keys) and time.monotonic() < deadline:
        meanwhile()
        time.sleep(POLL_SECONDS)


def _note_deaths(store: dist.Store, number: int, ranks: Mapping[int, SpawnProcess]) -> None:
    """Write the results of this node's ranks that died in a stage."""
    for rank, process in ranks.items():
        code, key = process.exitcode, result_key(number, rank)
        # A rank writes its result before it exits: without one, it died in this stage, or idle before it.
        if code is not None and not store.check([key]):
            ending = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            store.set(key, json.dumps(StageResult(error=f"its process {ending}", died=True)))


@contextmanager
def _started(
    fabric: Fabric, place: NodePlace, timeout_seconds: float, rank_main: RankMain
) -> Iterator[dict[int, SpawnProcess]]:
    """Start the processes of this node's ranks; kill them at the end of the block."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ranks = {}
    try:
        for rank in fabric.ranks_of(place.index):
            arguments = (rank, fabric, place.address, timeout_seconds)
            ranks[rank] = context.Process(target=rank_main, args=arguments, daemon=True)
            ranks[rank].start()
        yield ranks
    finally:
        for process in ranks.values():
            process.kill()
        deadline = time.monotonic() + END_SECONDS
        for process in ranks.values():
            process.join(max(0.0, deadline - time.monotonic()))  # a process that hangs in a driver cannot be killed


def exit_if_unkillable(exit_code: int) -> None:
    """Exit at once if a rank hangs in a driver, where no signal reaches it: Python would wait for it at exit."""
    if multiprocessing.active_children():
        sys.stdout.flush()
        os._exit(exit_code)
