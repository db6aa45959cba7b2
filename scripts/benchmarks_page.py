"""Generate docs/benchmarks.md from benchmarks/results/: the newest result of each benchmark, and how to repeat it.

python scripts/benchmarks_page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isclose
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks, which is not installed

from benchmarks.registry import BENCHMARKS
from benchmarks.result import Result
from benchmarks.table import format_number

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
HEADER = """\
# Benchmarks

After reading this page you know measured figures of this project next to peers and physical limits, and you can repeat
them.

    make bench                                # all benchmarks, one table: ours, peer or limit, ratio
    make bench ARGS="--smallest NAME"         # only checks that a benchmark runs; its results mean nothing

Every ratio is measured in one run, next to its peer or limit. `scripts/setup_trl.sh` and `scripts/setup_mbridge.sh`
install the peers; without them their lines are skipped. `make gpu` also runs the benchmarks that need a GPU: updates
that fill it, their peak memory next to the prediction of `plan`, the optimizer on the host next to the bus, and weight
sync next to a memory copy. With `--save` in `ARGS`, the results are written to `benchmarks/results/`.

The figures below are the newest recorded result of each benchmark, with file and machine; they are from the code of
their date. Other processes on the machine (its load) make a benchmark slower. A ratio is ours / limit; in parentheses
it is limit / ours, such as the speed-up of a time. "aim" is our target of the ratio.

This page is generated from `benchmarks/results/` by `python scripts/benchmarks_page.py`.
"""
ALGORITHMS = """\
## Algorithms on the demo's task

    make demo                                    # prepares the task and the warm-started model
    python scripts/compare_algorithms.py

One seed. Rewards are means of the first and the last five steps.
"""
STALENESS = """\
## Staleness and accuracy

    python scripts/demo.py --task think2
    python scripts/compare_staleness.py --task think2
    python scripts/compare_staleness.py --task work3

`sync` is synchronous; the number in `eta1` is `rollout.max_staleness`. All but `uncorrected` have decoupled PPO.
Accuracies are means over the seeds, with the standard deviation of the last one; staleness is in weight versions.
"""
ON_STALE_DATA = "losses_on_stale_data"
LOSSES = """\
## Losses on stale data

    python scripts/demo.py --task think2
    python scripts/compare_staleness.py --losses --task think2 --seeds 3

All runs are asynchronous with `rollout.max_staleness=4`. `corrected`: with truncated weights of tokens
(`algorithm.correction_preset=decoupled_token_is`), or, for a loss with an anchor, with the engine as the anchor.
Figures as above.
"""


@dataclass(frozen=True)
class Record:
    """A file of results. `machine`: date and machine; `contents`: all keys of the file."""

    name: str
    machine: str
    contents: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Record:
        contents = json.loads(path.read_text(encoding="utf-8"))
        return cls(path.name, contents["machine"], contents)

    @property
    def task(self) -> str:
        """Task of a comparison, the last word of the file's name."""
        return self.name.rpartition("-")[2].removesuffix(".json")

    @property
    def date(self) -> str:
        return self.machine.split()[0]

    @property
    def source(self) -> str:
        """Line with machine and file."""
        return f"{' '.join(self.machine.split())}; `benchmarks/results/{self.name}`"

    def results(self, benchmark: str) -> list[Result]:
        """Return the rows of a benchmark; empty if the file has none."""
        names = {field.name for field in fields(Result)}
        return [
            Result(**{key: value for key, value in row.items() if key in names})
            for outcome in self.contents.get("benchmarks", ())
            if outcome["benchmark"] == benchmark
            for row in outcome["results"]
        ]


def newest(records: Sequence[Record], benchmark: str) -> Record | None:
    """Return the newest file with results of a benchmark; of one day, the one with the most rows."""
    having = [record for record in records if record.results(benchmark)]
    return max(having, key=lambda record: (record.date, len(record.results(benchmark)), record.name), default=None)


def page(folder: Path = RESULTS) -> str:
    """Render the page."""
    records = [Record.read(path) for path in sorted(folder.glob("*.json"))]
    lines, missing = [HEADER], []
    for name, benchmark in BENCHMARKS.items():
        record = newest(records, name)
        if record is None:
            missing.append(name)
        else:
            lines += [f"## {name}: {benchmark.about}", "", *_section(name, record), ""]
    algorithms = max(
        (each for each in records if "algorithms" in each.contents), key=lambda each: each.date, default=None
    )
    if algorithms is not None:
        lines += [ALGORITHMS, *_algorithms(algorithms), ""]
    for heading, key in ((STALENESS, "ways"), (LOSSES, ON_STALE_DATA)):
        # The newest file of a task contains the earlier ones (compare_staleness.py --continue).
        by_task = {record.task: record for record in records if key in record.contents}
        if by_task:
            lines += [heading, *(line for record in by_task.values() for line in _staleness(record, key))]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        lines += ["## Without recorded results", "", f"{names}. `make gpu` runs those that begin with gpu.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, record: Record) -> Iterator[str]:
    yield f"    make bench ARGS={name}"
    yield ""
    yield f"{record.source}."
    yield ""
    yield from _head(("measured", "ours", "peer or limit", "ratio", "aim", "met"))
    for result in record.results(name):
        met = {True: "yes", False: "**no**", None: ""}[result.met]
        ratio = format_number(result.ratio)
        if not isclose(result.ratio, result.ours / result.limit, rel_tol=1e-6):
            ratio = f"({ratio})"
        values = (f"{format_number(value)} {result.unit}".strip() for value in (result.ours, result.limit))
        yield _row((result.name.strip(), *values, ratio, result.aim, met))


def _algorithms(record: Record) -> Iterator[str]:
    yield f"{record.source}."
    yield ""
    yield from _head(("algorithm", "steps", "accuracy before", "after", "reward before", "after"))
    for name, result in record.contents["algorithms"].items():
        figures = (f"{figure:.3f}" for figure in (*result["accuracy"], *result["reward"]))
        yield _row((name, f"{result['steps']}", *figures))


def _staleness(record: Record, key: str) -> Iterator[str]:
    yield f"Task {record.task}: {record.source}."
    yield ""
    yield from _head(("configuration", "seeds", "steps", "accuracy before", "after", "best", "staleness", "oldest"))
    for name, runs in record.contents[key].items():
        after = [run["accuracy"][-1] for run in runs]
        deviation = f" ± {stdev(after):.3f}" if len(after) > 1 else ""
        figures = (
            mean(run["accuracy"][0] for run in runs),
            mean(max(run["accuracy"]) for run in runs),
            mean(run["staleness_mean"] for run in runs),
        )
        before, best, staleness = (f"{figure:.3f}" for figure in figures)
        oldest = f"{max(run['staleness_max'] for run in runs):g}"
        steps = f"{runs[0]['steps']}"
        yield _row((name, f"{len(runs)}", steps, before, f"{mean(after):.3f}{deviation}", best, staleness, oldest))
    yield ""


def _head(cells: Sequence[str]) -> tuple[str, str]:
    return _row(cells), f"|{'---|' * len(cells)}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
