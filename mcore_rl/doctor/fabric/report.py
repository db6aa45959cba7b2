"""What a fabric test found, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from mcore_rl.doctor.fabric.plan import Fabric
from mcore_rl.doctor.fabric.verdict import Figure, Problem


@dataclass(frozen=True)
class Report:
    """The figures of all stages that were run, and what is wrong. `device`: what rank 0 measured on."""

    fabric: Fabric
    device: str
    figures: tuple[Figure, ...]
    problems: tuple[Problem, ...]

    def blamed(self) -> dict[str, Problem]:
        """The nodes to leave out, by name, each with the first problem that names it; failing ones first."""
        by_weight = sorted(self.problems, key=lambda problem: problem.kind != "failing")
        blamed: dict[str, Problem] = {}
        for problem in by_weight:
            for node in problem.nodes:
                blamed.setdefault(self.fabric.hosts[node], problem)
        return blamed

    def to_note(self) -> str:
        """The whole of it as text, for from_note on another node."""
        return json.dumps(asdict(self))

    @classmethod
    def from_note(cls, note: str) -> Report:
        fields = json.loads(note)
        fabric = Fabric(**fields["fabric"] | {"hosts": tuple(fields["fabric"]["hosts"])})
        figures = tuple(Figure(**figure | {"ranks": tuple(figure["ranks"])}) for figure in fields["figures"])
        problems = tuple(
            Problem(**problem | {"ranks": tuple(problem["ranks"]), "nodes": tuple(problem["nodes"])})
            for problem in fields["problems"]
        )
        return cls(fabric, fields["device"], figures, problems)


def as_json(report: Report) -> str:
    """The object that docs/slurm.md describes."""
    hosts = report.fabric.hosts
    problems = [asdict(problem) | {"nodes": [hosts[node] for node in problem.nodes]} for problem in report.problems]
    return json.dumps(
        {
            "ok": not report.problems,
            "device": report.device,
            "nodes": hosts,
            "slots": report.fabric.slots,
            "figures": [asdict(figure) for figure in report.figures],
            "problems": problems,
            "blamed": list(report.blamed()),
        }
    )


def as_text(report: Report) -> str:
    """A line per measurement with its median and its lowest figure, then a line per problem and the verdict."""
    fabric = report.fabric
    devices = "GPUs" if fabric.device == "cuda" else "slots"
    lines = [f"fabric test: nodes: {len(fabric.hosts)}, {devices} per node: {fabric.slots} ({report.device})"]
    lines += _measurements(report)
    lines += map(str, report.problems)
    if report.problems:
        lines.append(f"to blame: {', '.join(report.blamed()) or 'cannot be told from these figures'}")
    else:
        lines.append("fabric: all well")
    return "\n".join(lines)


def _measurements(report: Report) -> Iterator[str]:
    for name in dict.fromkeys(figure.stage for figure in report.figures):
        figures = [figure for figure in report.figures if figure.stage == name]
        lowest = min(figures, key=lambda figure: figure.value)
        typical = median(figure.value for figure in figures)
        beside = f"   lowest {lowest.value:9.4g}: {lowest.subject}" if len(figures) > 1 else ""
        yield f"{name:29}{typical:9.4g} {lowest.unit:8}{beside}"
