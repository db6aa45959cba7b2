"""Outcomes of tests, written while they run, so that a crash of pytest loses none. A pytest plugin
(`-p tests.gpu.outcomes`) that does nothing unless the environment variable LOG names a file."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

LOG = "MCORE_RL_GPU_TESTS_LOG"
FIGURE = "figure"
"""Property of a test with a measured value, for the summary."""
CRASHED = "the process of the tests ended during this test"


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test: passed, failed or skipped. `reason`: last lines of the error, or the reason of the skip."""

    test: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    figures: tuple[str, ...] = ()


class OutcomeLog:
    """Appends a line when a test begins and another one when it has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._phases: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._append(Outcome(nodeid, "failed", reason=CRASHED))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases[report.nodeid].append(report)
        if report.when == "teardown":
            self._append(_joined(report.nodeid, self._phases.pop(report.nodeid)))

    def _append(self, outcome: Outcome) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(LOG):
        config.pluginmanager.register(OutcomeLog(Path(path)))


def read_outcomes(path: Path) -> list[Outcome]:
    """Read the outcome of each test that has begun."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    outcomes = {}
    for line in lines:
        values = json.loads(line)
        outcomes[values["test"]] = Outcome(**{**values, "figures": tuple(values["figures"])})
    return list(outcomes.values())


def _joined(test: str, phases: list[pytest.TestReport]) -> Outcome:
    """Join the reports of a test's set-up, call and teardown."""
    kinds = {report.outcome: report for report in phases}
    outcome = next(kind for kind in ("failed", "skipped", "passed") if kind in kinds)
    figures = tuple(str(value) for name, value in phases[-1].user_properties if name == FIGURE)
    return Outcome(test, outcome, sum(report.duration for report in phases), _reason(kinds[outcome]), figures)


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext[-2000:] if report.outcome == "failed" else ""
