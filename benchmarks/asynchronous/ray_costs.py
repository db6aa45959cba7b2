"""Ray's cost for the driver of asynchronous rollouts: calls that submit tasks, and checks of their completion."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from benchmarks.driver.load import make_scalars
from benchmarks.driver.ray_ranks import EngineHandle, ReadyEngine, start
from benchmarks.sizes import size
from mcore_rl.config.schema import Config
from mcore_rl.data.records import part_path
from mcore_rl.rollout.tasks import Until
from mcore_rl.runtime.calls import ProcessHandle, unpacked
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.runtime.health import PART_OF_CALLS
from mcore_rl.runtime.roles.places import kill_all
from mcore_rl.types import RolloutTask, SamplingOptions

CALLS, AT_ONCE = size((200, 50), (4, 2))
LOOKS = size(50, 2)
TIMES = size(5, 2)
"""Repetitions. The fastest counts, because other processes on the machine make Ray's threads wake up more often."""


@dataclass(frozen=True)
class RayCosts:
    """CPU seconds of the driver, including Ray's threads.

    call: one call with a task, including its scalars.
    look: one check of pending calls, by the number of calls.
    """

    call: float
    look: dict[int, float]


def ray_costs(engines: list[int], samples: int) -> RayCosts:
    """Measure a call to one engine, and a check with one pending call per engine for each number in `engines`."""
    config = Config()
    config.cluster.device = "cpu"
    with (
        tempfile.TemporaryDirectory(prefix="mcore_rl_async_") as directory,
        ray_cluster(config.cluster, {"CPU": 1.0}) as [node],
    ):
        engine = EngineHandle("engine", start(ReadyEngine, node, "engine", make_scalars).actor, 0)
        try:
            records = Path(directory) / "rollouts"
            records.mkdir()
            tasks = [(number, _task(number, samples, records)) for number in range(TIMES * CALLS)]
            parts = iter([tasks[first : first + CALLS] for first in range(0, len(tasks), CALLS)])
            call = _cpu_seconds(lambda: _round_trips(engine, next(parts))) / CALLS
            # Calls that never end while the engine lives, so that every check finds all of them pending.
            pending = [engine.call(EngineProcess.watch) for _ in range(max(engines))]
            return RayCosts(call, {count: _look(pending[:count]) for count in engines})
        finally:
            kill_all([engine])


def _task(number: int, samples: int, records: Path) -> RolloutTask:
    ids = np.array([number], np.int64)
    options = SamplingOptions(4096)
    return RolloutTask("train", ids, ids, samples, options, 1, part_path(records, "group", 0, number), version=3)


def _round_trips(engine: ProcessHandle[EngineProcess], tasks: list[tuple[int, RolloutTask]]) -> None:
    """Call the engine once per task, AT_ONCE calls at a time."""
    for first in range(0, len(tasks), AT_ONCE):
        parts = [[task] for task in tasks[first : first + AT_ONCE]]
        calls = [engine.call(EngineProcess.run, part, Until.ANY, [part[0][0]]) for part in parts]
        # Like the driver: wait for all calls, then read their results.
        ray.wait(calls, num_returns=len(calls), fetch_local=False)
        for call in calls:
            unpacked(ray.get(call))


def _look(pending: list[ray.ObjectRef]) -> float:
    """Return the CPU seconds of one check of `pending`."""
    enough = max(1, len(pending) // PART_OF_CALLS)

    def looks() -> None:
        for _ in range(LOOKS):
            # As in Watch.wait, but with a timeout that ends the wait at once.
            ray.wait(pending, num_returns=enough, timeout=0.001, fetch_local=False)

    return _cpu_seconds(looks) / LOOKS


def _cpu_seconds(action: Callable[[], None]) -> float:
    """Return the CPU seconds of all threads, minimum over TIMES repetitions."""
    seconds = []
    for _ in range(TIMES):
        # Ray's threads of this process count too: they use the core that the driver needs.
        started = time.process_time()
        action()
        seconds.append(time.process_time() - started)
    return min(seconds)
