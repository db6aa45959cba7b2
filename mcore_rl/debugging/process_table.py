"""Table of the processes that a run would start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from mcore_rl.config.schema import Config
from mcore_rl.resolved.process_plan import PlannedProcess, ProcessPlan
from mcore_rl.runtime.cluster import process_environment
from mcore_rl.runtime.cores import THREADS, shares_cores, threads_per_process

COLUMNS = ("process", "node", "devices", "CPUs", "threads", "children")
Row = tuple[str, str, str, str, str, str]
"""Cells of COLUMNS."""


def process_table(plan: ProcessPlan, config: Config) -> Table:
    """Return one row per process; neighbours that differ only in their number share a row.

    CPUs: reserved in Ray; an engine has as many ranks. Threads: per rank.
    Shared GPUs are named by their trainer ranks. Children are processes that the process itself starts.
    """
    table = Table(title="Processes")
    for column in COLUMNS:
        table.add_column(column)
    for row in (_driver(config), *process_rows(plan, config)):
        # Text, since rich would interpret brackets in a string as markup.
        table.add_row(*(Text(cell) for cell in row))
    return table


def process_rows(plan: ProcessPlan, config: Config) -> Iterator[Row]:
    """Yield the rows of all processes besides the driver."""
    shares = shares_cores(config)
    rows = [(each.name, _cells(each, config, shares=shares)) for each in plan]
    for cells, equal in groupby(rows, key=lambda row: row[1]):
        yield (_range([name for name, _ in equal]), *cells)


def node_line(config: Config, host: str) -> str:
    """Describe the numbering of the nodes. `host`: name of this host."""
    last = config.cluster.nodes - 1
    if not last:
        return f"node 0 is this host ({host})"
    others = "node 1 is another one" if last == 1 else f"nodes 1 to {last} are others, in order of name,"
    return f"node 0 is this host ({host}); {others} of the Ray cluster at {config.cluster.address}"


def _driver(config: Config) -> Row:
    children = "Ray" if config.cluster.address is None else ""
    return ("driver", "0", "none", "1", "1", children)


def _cells(each: PlannedProcess, config: Config, *, shares: bool) -> tuple[str, str, str, str, str]:
    threads = _threads(each, shares=shares, on_gpus=config.cluster.uses_cuda)
    return str(each.node), _devices(each), str(each.num_cpus), threads, _children(each, config)


def _devices(each: PlannedProcess) -> str:
    if each.num_gpus:
        return _count(each.num_gpus, "GPU")
    if not each.shares_gpus_of:
        return "none"
    ranks = each.shares_gpus_of
    if len(ranks) == 1:
        return f"GPU of rank {ranks[0]}"
    return f"GPUs of ranks {ranks[0]}-{ranks[-1]}"


def _threads(each: PlannedProcess, *, shares: bool, on_gpus: bool) -> str:
    if not shares:
        return os.environ.get(THREADS, process_environment(on_gpus=on_gpus)[THREADS])
    # Other nodes may have another number of cores.
    return str(threads_per_process(each.peers)) if each.node == 0 else f"cores / {each.peers}"


def _children(each: PlannedProcess, config: Config) -> str:
    """Return the kinds of processes that the process starts: an engine's leader starts graders and tools."""
    if each.section != "rollout" or ", host " in each.name:
        return ""
    children = [f"{config.reward.workers} grading"]
    if config.rollout.tools is not None:
        children.append(f"{config.rollout.tool_processes} tool")
    return ", ".join(children)


def _range(names: Sequence[str]) -> str:
    """Return `trainer ranks 0-3` for the names of consecutive processes."""
    if len(names) == 1:
        return names[0]
    kind, _, first = names[0].rpartition(" ")
    return f"{kind}s {first}-{names[-1].rpartition(' ')[2]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
