"""Report of a fabric test as text and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median

from mcore_rl.doctor.fabric.plan import Fabric
from mcore_rl.doctor.fabric.verdict import Figure, Problem


@dataclass(frozen=True)
class Report:
    """Measurements and problems of all stages. device: description of rank 0's device."""

    fabric: Fabric
    device: str
    figures: list[Figure]
    problems: list[Problem]

    def blamed(self) -> dict[str, Problem]:
        """Return the nodes to exclude, each with its first problem; failures precede slowness."""
        blamed: dict[str, Problem] = {}
        for problem in sorted(self.problems, key=lambda problem: problem.kind != "failing"):
            for node in problem.nodes:
                blamed.setdefault(self.fabric.hosts[node], problem)
        return blamed

    def as_json(self) -> str:
        """Return the object described in docs/slurm.md."""
        hosts = self.fabric.hosts
        problems = [asdict(problem) | {"nodes": [hosts[node] for node in problem.nodes]} for problem in self.problems]
        return json.dumps(
            {
                "ok": not self.problems,
                "device": self.device,
                "nodes": hosts,
                "slots": self.fabric.slots,
                "figures": [asdict(figure) for figure in self.figures],
                "problems": problems,
                "blamed": list(self.blamed()),
            }
        )

    def as_text(self) -> str:
        """Return one line per measurement with its median and minimum, one per problem, and the verdict."""
        fabric = self.fabric
        devices = "GPUs" if fabric.device == "cuda" else "slots"
        lines = [f"fabric test: nodes: {len(fabric.hosts)}, {devices} per node: {fabric.slots} ({self.device})"]
        for name in dict.fromkeys(figure.stage for figure in self.figures):
            figures = [figure for figure in self.figures if figure.stage == name]
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
