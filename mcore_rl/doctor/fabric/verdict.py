"""What follows from the figures: which device, node or link is slow or failing, and which node is to blame. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_rl.doctor.fabric.plan import Fabric, Stage, Subject


@dataclass(frozen=True)
class Answer:
    """What became of one rank in one stage: a figure, an error, or none of them where it had no part."""

    value: float | None = None
    error: str | None = None
    died: bool = False


@dataclass(frozen=True)
class Figure:
    """A measured speed, of the ranks that it took; `subject` names them."""

    stage: str
    unit: str
    subject: str
    ranks: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Problem:
    """One thing that is slow or failing. `nodes`: which to leave out; none where it cannot be told who is to blame."""

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


@dataclass(frozen=True)
class Offer:
    """What a node brings: its name, the kind of its devices (cuda or cpu), and how many."""

    host: str
    device: str
    slots: int


def unfit(
    offers: Mapping[int, Offer], hosts: Sequence[str], slots: int | None, timeout_seconds: float
) -> tuple[Fabric, list[Problem]]:
    """The fabric that these nodes were to make, and which of them have not come or lack devices. `hosts`: the names of
    all nodes; `slots`: of each, None for as many as the best of them has."""
    device = "cuda" if any(offer.device == "cuda" for offer in offers.values()) else "cpu"
    expected = slots or max(offer.slots for offer in offers.values() if offer.device == device)
    if len(set(hosts)) < len(hosts):  # pretended nodes of one machine
        hosts = [f"{host}/{node}" for node, host in enumerate(hosts)]
    fabric = Fabric(tuple(hosts), expected, device)
    problems = []
    for node, host in enumerate(hosts):
        offer = offers.get(node)
        reason = None
        if offer is None:
            reason = f"has not come within {timeout_seconds:g} s"
        elif (offer.device, offer.slots) != (device, expected):
            reason = f"has {offer.slots} {offer.device} slots, not {expected} of {device}"
        if reason:
            problems.append(Problem("failing", "meeting", host, reason, (), (node,)))
    return fabric, problems


def name_of(stage: Stage, fabric: Fabric, ranks: Sequence[int]) -> str:
    """What a figure or a failure of these ranks is said to be of."""
    match stage.subject:
        case Subject.DEVICE:
            return fabric.rank_name(ranks[0])
        case Subject.NODE:
            return f"{fabric.hosts[fabric.node_of(ranks[0])]} (ranks {ranks[0]}-{ranks[-1]})"
        case Subject.LINK:
            one, other = (fabric.hosts[fabric.node_of(rank)] for rank in ranks)
            return f"{one} - {other}, {fabric.device_name(ranks[0])}"
        case Subject.WHOLE:
            return "all nodes"


def figures_of(stage: Stage, fabric: Fabric, answers: Mapping[int, Answer]) -> list[Figure]:
    """A figure per rank, or per group: that of its slowest rank. Groups of which a rank has none are left out."""
    if stage.unit is None:
        return []
    figures = []
    for ranks in stage.groups or [(rank,) for rank in range(fabric.num_ranks)]:
        values = [answers[rank].value for rank in ranks if rank in answers]
        measured = [value for value in values if value is not None]
        if len(measured) == len(ranks):
            figures.append(Figure(stage.name, stage.unit, name_of(stage, fabric, ranks), ranks, min(measured)))
    return figures


def slow(subject: Subject, figures: Sequence[Figure], fabric: Fabric, percent: float) -> list[Problem]:
    """Which of these figures, all of one measurement, are below `percent` of the median of the others.

    A slow link alone blames nobody; a node both of whose pairs are slow is to blame.
    """
    problems = []
    if len(figures) < 2:
        return []
    ordered = sorted(figure.value for figure in figures)
    for figure in figures:
        usual = _median_of_others(ordered, figure.value)
        if figure.value >= percent / 100 * usual:
            continue
        reason = f"{figure.value:.4g} {figure.unit}, {100 * figure.value / usual:.0f} % of the others' {usual:.4g}"
        nodes = () if subject is Subject.LINK else (fabric.node_of(figure.ranks[0]),)
        problems.append(Problem("slow", figure.stage, figure.subject, reason, figure.ranks, nodes, figure.value, usual))
    if subject is Subject.LINK:
        problems += _nodes_of_slow_links(problems, fabric)
    return problems


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """Of at least two figures in order, without one that is `value`. In constant time: there is one for every rank."""
    skipped, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[i + (i >= skipped)] for i in (last // 2, (last + 1) // 2))
    return (low + high) / 2


def _nodes_of_slow_links(links: Sequence[Problem], fabric: Fabric) -> list[Problem]:
    partners: dict[int, set[int]] = {}
    for link in links:
        one, other = (fabric.node_of(rank) for rank in link.ranks)
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
    return [
        Problem("slow", links[0].stage, fabric.hosts[node], "slow in both of its pairs", (), (node,))
        for node in sorted(partners)
        if len(partners[node]) == 2
    ]


def failing(stage: Stage, fabric: Fabric, answers: Mapping[int, Answer], timeout_seconds: float) -> list[Problem]:
    """Whose fault it is that a stage did not succeed on all ranks; none where it did.

    Where ranks communicate, one that fails takes others with it: who died comes before who raised, and who raised
    before who gave no answer, since it waits for one of them.
    """
    died = {rank: answer.error or "died" for rank, answer in answers.items() if answer.died}
    raised = {rank: answer.error for rank, answer in answers.items() if answer.error and not answer.died}
    silence = f"no answer within {timeout_seconds:g} s"
    silent = [rank for rank in range(fabric.num_ranks) if rank not in answers]
    if not stage.groups:
        reasons = {**died, **raised, **dict.fromkeys(silent, silence)}
        return [_of_rank(stage, fabric, rank, reasons[rank]) for rank in sorted(reasons)]
    if died or raised:
        return [_of_rank(stage, fabric, rank, reason) for rank, reason in sorted((died or raised).items())]
    waiting = [group for group in stage.groups if set(group) & set(silent)]
    problems = [_of_group(stage, fabric, group, silence) for group in waiting]
    # Those without a part in this stage answer at once, unless they hang by themselves.
    idle = [rank for rank in silent if stage.group_of(rank) is None]
    return problems + [_of_rank(stage, fabric, rank, silence) for rank in idle]


def _of_rank(stage: Stage, fabric: Fabric, rank: int, reason: str) -> Problem:
    return Problem("failing", stage.name, fabric.rank_name(rank), reason, (rank,), (fabric.node_of(rank),))


def _of_group(stage: Stage, fabric: Fabric, group: tuple[int, ...], reason: str) -> Problem:
    nodes = tuple(sorted({fabric.node_of(rank) for rank in group}))
    return Problem("failing", stage.name, name_of(stage, fabric, group), reason, group, nodes)
