"""Journal of a run: collects the metrics of each step and writes them to all logs and displays."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from mcore_rl.config.observe import ObserveConfig
from mcore_rl.observe.endpoint import MetricsEndpoint
from mcore_rl.observe.metrics import TIMELINE, MetricsLog, set_aside
from mcore_rl.observe.progress import Progress
from mcore_rl.observe.report.background import ReportProcess
from mcore_rl.observe.signs import CollapseSigns, Sign
from mcore_rl.observe.terminal_text import printable
from mcore_rl.observe.timeline import STEP_SPAN, Timeline
from mcore_rl.observe.trackers.group import Trackers
from mcore_rl.types import Metric, Span

TRAINING_PHASES = (
    *("rollout", "logp", "reference", "teacher", "values", "advantages"),
    *("critic_update", "update", "weight_sync"),
)
STEP_PHASES = (*TRAINING_PHASES, "verify", "validate", "checkpoint")
"""Phases of time/step. A checkpoint contains the metrics of its step, so its time counts for the next step."""


@dataclass
class RunJournal:
    """Collects the metrics of a step; finish_step adds times and writes them to all logs and displays.

    own_spans: function that drains the spans of this process.
    sources: functions that drain the spans of other processes.
    signs: signs of collapse to warn about.
    report: process that writes the report during the run; None: no report.
    observe: trackers, and their settings.
    """

    run_dir: Path
    total_steps: int
    own_spans: Callable[[], list[Span]]
    sources: Sequence[Callable[[], list[Span]]]
    signs: InitVar[Sequence[Sign]] = ()
    report: ReportProcess | None = None
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    _pending: dict[str, Metric] = field(default_factory=dict, init=False)
    _progress: Progress | None = field(default=None, init=False)

    def __post_init__(self, signs: Sequence[Sign]) -> None:
        self._metrics, self._signs = MetricsLog(self.run_dir), CollapseSigns(signs)

    def resume_after(self, step: int) -> None:
        """Continue the files of earlier starts. Records of steps after `step` (-1: all) are moved to earlier/ first."""
        kept = set_aside(self.run_dir, step)
        self._timeline = Timeline(self.run_dir / TIMELINE)
        self._trackers = Trackers(self.run_dir, self.observe, first_step=step + 1)
        self._progress = Progress(self.total_steps, first_step=max(step, 0))
        self._endpoint = self._start_endpoint()
        if kept is not None:
            since = f"of steps after {step}" if step >= 0 else "of a start that saved nothing"
            self.note(f"the records {since} are kept in {kept}")

    def note(self, line: str) -> None:
        """Print a line to stderr. It may quote a model's text."""
        print(printable(line), file=sys.stderr, flush=True)

    def record(self, metrics: dict[str, Metric]) -> None:
        """Add metrics of the current step. They must already be reduced over ranks."""
        self._pending.update(metrics)

    def finish_step(self, step: int) -> None:
        """Write metrics and spans of the step. A recorded metric replaces the time of a phase with the same name."""
        spans, seconds = self.own_spans(), defaultdict[str, float](float)
        for span in spans:
            seconds[span.name] += span.end - span.start
        values = {f"time/{name}": took for name, took in seconds.items()}
        values["time/step"] = sum(seconds.get(phase, 0.0) for phase in STEP_PHASES)
        training = sum(seconds.get(phase, 0.0) for phase in TRAINING_PHASES)
        # After the times of spans: a recorded metric overrides them.
        values |= {name: metric.value for name, metric in self._pending.items()}
        if training > 0 and "tokens/trained_sequences" in values:
            values["throughput/tokens_per_second"] = values["tokens/trained_sequences"] / training
        self._pending = {}
        # Written before all other outputs: the summary and resumed runs read the metrics from this file.
        self._metrics.append(step, values)
        self._timeline.append([*_step_span(step, spans), *spans, *(span for each in self.sources for span in each())])
        assert self._progress is not None, "resume_after was not called"
        self._progress.update(step, values)
        for warning in self._signs.check(step, values):
            self.note(f"warning: {warning}")
        # After metrics.jsonl, which belongs to the run; a tracker only receives copies.
        self._trackers.step_finished(step, values)
        if self._endpoint is not None:
            self._endpoint.step_finished(step, values)
        for line in self._trackers.news():
            self.note(line)
        if self.report is not None:
            self.report.step_finished(step)

    def close(self, *, failed: bool = False) -> None:
        """Close the trackers and the endpoint, if the run has begun, and stop the report's process. `failed`: an error
        or a signal ends the run."""
        if self.report is not None:
            self.report.close()
        if self._progress is not None:
            if self._endpoint is not None:
                self._endpoint.close()
            for line in self._trackers.close(failed=failed):
                self.note(line)

    def _start_endpoint(self) -> MetricsEndpoint | None:
        host, port = self.observe.prometheus_host, self.observe.prometheus_port
        if not port:
            return None
        try:
            return MetricsEndpoint(host, port, self.observe.run_name or self.run_dir.absolute().name)
        # The address was free when the run was checked, but another process has taken it since.
        except OSError as error:
            self.note(f"warning: no metrics at observe.prometheus_port={port}: {error.strerror}; the run continues")
            return None


def _step_span(step: int, spans: Sequence[Span]) -> list[Span]:
    """Return one span from the first to the last of the driver's spans of a step; [] without spans."""
    if not spans:
        return []
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    return [Span(f"{STEP_SPAN}{step}", start, end, spans[0].process)]
