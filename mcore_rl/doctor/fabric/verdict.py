"""Slow and failing devices, nodes and links, and the nodes to blame. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mcore_rl.doctor.fabric.plan import Fabric, Stage


class Offer(NamedTuple):
    """Name of a node, kind of its devices (cuda or cpu), and their number."""

    host: str
    device: str
    slots: int


class Result(NamedTuple):
    """Outcome of one stage on one rank: a measured value or an error; neither in stages that only check.

    device: name of the device and versions of its libraries.
    """

    value: float | None = None
    error: str | None = None
    died: bool = False
    device: str = ""


@dataclass(frozen=True)
class Figure:
    """Measured speed. subject: name of the device, node or link."""

    stage: str
    unit: str
    subject: str
    ranks: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Problem:
    """Something slow or failing. nodes: indices of the nodes to blame; empty if no node can be blamed."""

    kind: Literal["slow", "failing"]
    stage: str
    subject: str
    reason: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    value: float | None = None
    median_of_others: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.stage}: {self.subject}: {self.reason}"


def plan_fabric(
    offers: Mapping[int, Offer], hosts: Sequence[str], slots: int | None, timeout_seconds: float
) -> tuple[Fabric, list[Problem]]:
    """Return the fabric under test and the nodes that are absent or lack devices.

    hosts: names of all nodes.
    slots: devices per node; None: the highest number that a node offers.
    """
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
        problems.append(Problem("failing", "meeting", host, reason, (), (node,)))
    return Fabric(tuple(hosts), expected, device), problems


def figures_of(stage: Stage, results: Mapping[int, Result]) -> list[Figure]:
    """Return one figure per group: the lowest value of its ranks. Incomplete groups have none."""
    figures = []
    for ranks, subject in stage.groups.items():
        values = [results[rank].value for rank in ranks if rank in results]
        measured = [value for value in values if value is not None]
        if stage.unit and len(measured) == len(ranks):
            figures.append(Figure(stage.name, stage.unit, subject, ranks, min(measured)))
    return figures


def find_failures(stage: Stage, fabric: Fabric, results: Mapping[int, Result], timeout_seconds: float) -> list[Problem]:
    """Return the causes of failed groups.

    A rank that fails in a collective makes its peers fail too. So ranks that died are blamed before ranks that raised,
    and the whole group is blamed only if some ranks are silent and none failed.
    """
    problems = []
    for group, subject in stage.groups.items():
        died = {rank: results[rank].error for rank in group if rank in results and results[rank].died}
        raised = {rank: results[rank].error for rank in group if rank in results and results[rank].error}
        for rank, error in (died or raised).items():
            node = (fabric.node_of(rank),)
            problems.append(Problem("failing", stage.name, fabric.rank_name(rank), str(error), (rank,), node))
        if not raised and not results.keys() >= set(group):
            nodes = tuple(sorted({fabric.node_of(rank) for rank in group}))
            reason = f"no answer within {timeout_seconds:g} s"
            problems.append(Problem("failing", stage.name, subject, reason, group, nodes))
    return problems


def find_slow(stage: Stage, figures: Sequence[Figure], fabric: Fabric, percent: float) -> list[Problem]:
    """Return the measured values of a stage that are below `percent` of the median of the others.

    A slow link alone does not blame its nodes; a node with two slow links is blamed.
    """
    figures = [figure for figure in figures if figure.stage == stage.name]
    if len(figures) < 2:
        return []
    problems = []
    ordered = sorted(figure.value for figure in figures)
    for figure in figures:
        median = _median_of_others(ordered, figure.value)
        if figure.value < percent / 100 * median:
            share = f"{100 * figure.value / median:.0f} % of the others' {median:.4g}"
            reason = f"{figure.value:.4g} {figure.unit}, {share}"
            nodes = () if stage.link else (fabric.node_of(figure.ranks[0]),)
            problems.append(
                Problem("slow", stage.name, figure.subject, reason, figure.ranks, nodes, figure.value, median)
            )
    if stage.link:
        pairs = {tuple(fabric.node_of(rank) for rank in problem.ranks) for problem in problems}
        for node, host in enumerate(fabric.hosts):
            if sum(node in pair for pair in pairs) == 2:
                problems.append(Problem("slow", stage.name, host, "slow in both of its pairs", (), (node,)))
    return problems


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one that equals `value`. O(log n), since every rank has a figure."""
    skipped, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[i + (i >= skipped)] for i in (last // 2, (last + 1) // 2))
    return (low + high) / 2
