"""Report of a fabric test: slow and failing devices, nodes and links, and the nodes to blame."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Literal

from mcore_rl.doctor.fabric.plan import Fabric, Stage, StageResult


@dataclass(frozen=True)
class Figure:
    """Measured speed. subject: name of the device, node or link."""

    stage: str
    unit: str
    subject: str
    ranks: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class FabricProblem:
    """Something slow or failing. nodes: names of the nodes to blame; empty if no node can be blamed."""

    kind: Literal["slow", "failing"]
    stage: str
    subject: str
    reason: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    value: float | None = None
    median_of_others: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.stage}: {self.subject}: {self.reason}"


@dataclass
class FabricReport:
    """Measurements and problems of all stages. device: description of rank 0's device."""

    fabric: Fabric
    device: str
    figures: list[Figure]
    problems: list[FabricProblem]

    def by_stage(self) -> dict[str, list[Figure]]:
        """Return the figures of each measurement, by name in order."""
        # The stages of one measurement are consecutive.
        return {name: list(figures) for name, figures in groupby(self.figures, key=lambda figure: figure.stage)}

    def blamed(self) -> dict[str, FabricProblem]:
        """Return the nodes to exclude, each with its first problem; failures precede slowness."""
        blamed: dict[str, FabricProblem] = {}
        for problem in sorted(self.problems, key=lambda problem: problem.kind != "failing"):
            for host in problem.nodes:
                blamed.setdefault(host, problem)
        return blamed

    def as_json(self) -> str:
        """Return the object described in docs/slurm.md."""
        return json.dumps(
            {
                "ok": not self.problems,
                "device": self.device,
                "nodes": self.fabric.hosts,
                "slots": self.fabric.slots,
                "figures": [asdict(figure) for figure in self.figures],
                "problems": [asdict(problem) for problem in self.problems],
                "blamed": list(self.blamed()),
            }
        )

    def as_text(self) -> str:
        """Return one line per measurement with its median and minimum, one per problem, and the verdict."""
        fabric = self.fabric
        devices = "GPUs" if fabric.device == "cuda" else "slots"
        lines = [f"fabric test: nodes: {len(fabric.hosts)}, {devices} per node: {fabric.slots} ({self.device})"]
        for name, figures in self.by_stage().items():
            lowest = min(figures, key=lambda figure: figure.value)
            typical = median(figure.value for figure in figures)
            beside = f"   lowest {lowest.value:9.4g}: {lowest.subject}" if len(figures) > 1 else ""
            lines.append(f"{name:29}{typical:9.4g} {lowest.unit:8}{beside}")
        lines += map(str, self.problems)
        if self.problems:
            lines.append(f"to blame: {', '.join(self.blamed()) or 'cannot be determined from these measurements'}")
        else:
            lines.append("fabric: all well")
        return "\n".join(lines)


def figures_of(stage: Stage, results: Mapping[int, StageResult]) -> list[Figure]:
    """Return one figure per group: the lowest value of its ranks. Incomplete groups have none."""
    figures = []
    for ranks, subject in stage.groups.items():
        values = [results[rank].value for rank in ranks if rank in results]
        measured = [value for value in values if value is not None]
        if stage.unit and len(measured) == len(ranks):
            # A collective is as fast as its slowest rank, whatever the others measured.
            figures.append(Figure(stage.name, stage.unit, subject, ranks, min(measured)))
    return figures


def find_failures(
    stage: Stage, fabric: Fabric, results: Mapping[int, StageResult], timeout_seconds: float
) -> list[FabricProblem]:
    """Return the causes of failed groups.

    A rank that fails in a collective makes its peers fail too. So ranks that died are blamed before ranks that raised,
    and the whole group is blamed only if some ranks are silent and none failed.
    """
    problems = []
    for group, subject in stage.groups.items():
        died = {rank: results[rank].error for rank in group if rank in results and results[rank].died}
        raised = {rank: results[rank].error for rank in group if rank in results and results[rank].error}
        for rank, error in (died or raised).items():
            host = fabric.host_of(rank)
            problems.append(FabricProblem("failing", stage.name, fabric.rank_name(rank), str(error), (rank,), (host,)))
        if not raised and not results.keys() >= set(group):
            hosts = tuple(dict.fromkeys(map(fabric.host_of, group)))
            reason = f"no answer within {timeout_seconds:g} s"
            problems.append(FabricProblem("failing", stage.name, subject, reason, group, hosts))
    return problems


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one `value`. O(log n), since every rank has a value."""
    skipped, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[index + (index >= skipped)] for index in (last // 2, (last + 1) // 2))
    return (low + high) / 2


def find_slow(figures: Sequence[Figure], fabric: Fabric, percent: float) -> list[FabricProblem]:
    """Return the values of one measurement that are below `percent` of the median of the others.

    A slow link alone does not blame its nodes; a node with two slow links is blamed.
    """
    problems: list[FabricProblem] = []
    slow_links: set[frozenset[str]] = set()
    ordered = sorted(figure.value for figure in figures)
    for figure in figures if len(figures) > 1 else ():
        value, typical = figure.value, _median_without(ordered, figure.value)
        if value < percent / 100 * typical:
            reason = f"{value:.4g} {figure.unit}, {100 * value / typical:.0f} % of the others' {typical:.4g}"
            hosts = tuple(dict.fromkeys(map(fabric.host_of, figure.ranks)))
            if len(hosts) == 2:  # either of the two can be the cause
                slow_links.add(frozenset(hosts))
                hosts = ()
            problems.append(
                FabricProblem("slow", figure.stage, figure.subject, reason, figure.ranks, hosts, value, typical)
            )
    for host in fabric.hosts:
        if sum(host in link for link in slow_links) == 2:
            problems.append(FabricProblem("slow", figures[0].stage, host, "slow in both of its pairs", (), (host,)))
    return problems
