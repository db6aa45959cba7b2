"""All trackers of a run, as the journal uses them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from mcore_rl.config.observe import ObserveConfig
from mcore_rl.observe.trackers.delivery import StepEntry, TrackerThread
from mcore_rl.observe.trackers.interface import RunFacts, Tracker
from mcore_rl.observe.trackers.registry import TRACKERS
from mcore_rl.observe.trackers.responses import sample_responses
from mcore_rl.observe.trackers.run_facts import run_facts

CLOSE_SECONDS = 30.0
"""Time of all trackers together to send the rest at the end of a run."""


class Trackers:
    """Trackers of observe.trackers, each with a thread of its own, from a resume or start on."""

    def __init__(self, run_dir: Path, observe: ObserveConfig, first_step: int) -> None:
        """Start the threads. `first_step`: first step that will be reported."""
        facts = run_facts(run_dir, observe, first_step)
        read = partial(sample_responses, run_dir, count=observe.table_responses)
        self._threads = [TrackerThread(name, _opener(name, facts), read) for name in observe.trackers]

    def step_finished(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the finite metrics of a step, and its responses, for every tracker."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for thread in self._threads:
            thread.put(StepEntry(step, finite))

    def news(self) -> list[str]:
        """Return lines about trackers that have begun to fail or to lose entries."""
        return [line for thread in self._threads for line in thread.news()]

    def close(self, *, failed: bool) -> list[str]:
        """Send the rest and close all trackers, for CLOSE_SECONDS at most. Returns lines about lost entries."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.request_close(failed=failed)
        return [line for thread in self._threads for line in thread.join(deadline)]


def _opener(name: str, facts: RunFacts) -> Callable[[], Tracker]:
    return lambda: TRACKERS[name].open(facts)
