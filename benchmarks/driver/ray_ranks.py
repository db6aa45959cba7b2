"""Real Ray actors for benchmarks.driver.driver that return at once, behind the real groups of a run."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from benchmarks.driver.load import DP_RANKS, ENGINES, Make, make_scalars, write_records
from benchmarks.sizes import size
from mcore_rl.config.schema import Config
from mcore_rl.rollout.tasks import GivenUp, Until
from mcore_rl.runtime.calls import FanOut, ProcessHandle, Ref, packed, remote_method
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.process import EngineReport
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.roles.base import RankProcess, RunProcess
from mcore_rl.runtime.roles.groups import RankMap
from mcore_rl.runtime.roles.places import kill_all
from mcore_rl.runtime.roles.trainer import TrainerGroup
from mcore_rl.runtime.trajectory_store import FetchRequest
from mcore_rl.types import Mean, Metric, RankShares, RolloutScalars, RolloutTask

T = TypeVar("T")
PROCESSES = 2
RANKS_PER_NODE = size(8, 2)


@ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)
class ReadyEngine(RunProcess):
    """Returns prepared scalars, the same for all tasks with the same number of groups.

    Computing them per task would count as time of the driver.
    """

    def __init__(self, name: str, make: Make) -> None:
        super().__init__(name)
        self._make = make
        self._received: Counter[int] = Counter()
        """Requests received by each of the engines that this process simulates."""
        self._ready: dict[int, RolloutScalars] = {}
        """Scalars by number of groups; groups are numbered from 0."""

    def give_up(self, free: int) -> GivenUp:
        """Give up nothing: all tasks have ended."""
        return GivenUp([], 0)

    @packed
    def run(self, engine: int, tasks: list[tuple[int, RolloutTask]], until: Until, forget: list[int]) -> EngineReport:
        for _, task in tasks:
            write_records(Path(str(task.records)).parents[1], task)
        self._received[engine] += sum(task.num_responses for _, task in tasks)
        ended = [(number, 0, self._scalars(task)) for number, task in tasks]
        return EngineReport(ended, self._received[engine], 0, 0.0, 0)

    def _scalars(self, task: RolloutTask) -> RolloutScalars:
        count = len(task.group_ids)
        if count not in self._ready:
            self._ready[count] = self._make(replace(task, group_ids=np.arange(count)))
        ready = self._ready[count]
        groups = ready.group_ids  # numbers from 0: places of the task's groups
        return replace(ready, group_ids=task.group_ids[groups], prompt_rows=task.prompt_rows[groups])


@dataclass(eq=False)
class EngineHandle(ProcessHandle[Any]):
    """Handle of one of the engines that a ReadyEngine simulates. Its calls of `run` name the engine, because reports
    count the requests of each engine."""

    number: int

    def call(self, method: Callable[..., T], *arguments: object, **options: object) -> Ref[T]:
        own = (self.number,) if method.__name__ == "run" else ()
        return super().call(method, *own, *arguments, **options)


class Up(FleetEngine):
    """Engine that is always running."""

    def __init__(self, number: int, process: ProcessHandle[Any], watch: Watch) -> None:
        self.process = process
        super().__init__(number, f"engine {number}", [], [], watch, "", None)

    def __post_init__(self) -> None: ...

    def kill(self) -> None:
        raise AssertionError(f"{self.name} was lost")


@ray.remote(concurrency_groups={"watch": 2, "pass_on": 1}, max_restarts=0)
class SilentTrainer(RankProcess):
    """Receives its share of a batch and drops it. Counts fetch requests without fetching, which is not driver work.

    peers: ranks with the same share, of which the first one returns metrics.
    """

    def __init__(self, name: str, peers: int) -> None:
        super().__init__(name)
        self.peers = peers

    @remote_method(concurrency_group="pass_on")
    def pass_on(
        self, method: str, arguments: list[tuple[object, ...]], neighbours: list[ActorHandle] | None
    ) -> list[object]:
        """Run the calls of a node. On a cluster, nodes work in parallel; `seconds_to_pass_on` measures one."""
        # A call contains references to shares, which Ray resolves only where they are arguments themselves.
        named = list({a for given in arguments for a in given if isinstance(a, ray.ObjectRef)})
        values = dict(zip(named, ray.get(named), strict=True))  # one per share, however many ranks read it
        read = [[values[a] if isinstance(a, ray.ObjectRef) else a for a in given] for given in arguments]
        found = [getattr(self, method)(*given) for given in read]
        # Of the ranks with the same share, only one returns metrics.
        return [metrics if rank % self.peers == 0 else type(metrics)() for rank, metrics in enumerate(found)]

    @remote_method(num_returns=2)
    def fetch(self, wanted: FetchRequest) -> tuple[None, int]:  # type: ignore[override]  # `recompute_logp` takes it
        return None, len(wanted.rows)

    def recompute_logp(self, key: int, shares: RankShares, fetched: int) -> dict[str, Metric]:
        assert fetched == len({*shares.table["samples"].tolist()})
        self.num_updates = len(shares.counts)
        return {"rollout/logp_diff_mean": Mean(0.0, self.num_updates)}

    def update(self, key: int, entropy_coefficient: float | None) -> list[dict[str, Metric]]:
        return [{"actor/loss": Mean(0.0, 1)} for _ in range(self.num_updates)]


class IdleRank(RankProcess):
    """Returns at once; forwards calls like the ranks of a run."""

    def nothing(self) -> None: ...


IdleActor = ray.remote(concurrency_groups={"watch": 2, "pass_on": 1}, max_restarts=0)(IdleRank)


def seconds_to_pass_on(calls: int) -> float:
    """Return the median time of a call that the first of RANKS_PER_NODE real ranks forwards to the others."""
    config = Config()
    config.cluster.device = "cpu"
    with ray_cluster(config.cluster, {"CPU": 1.0 * RANKS_PER_NODE}) as [node]:
        watch = Watch()
        ranks = [start(IdleActor, node, f"rank {rank}") for rank in range(RANKS_PER_NODE)]
        for handle in ranks:
            watch.add(handle)
        try:
            calls_of, seconds = FanOut(ranks, [0] * RANKS_PER_NODE, watch), []
            for _ in range(calls + 1):
                started = time.perf_counter()
                calls_of.call(IdleRank.nothing).results()
                seconds.append(time.perf_counter() - started)
            return statistics.median(seconds[1:])  # the first call also passes the handles of the other ranks
        finally:
            kill_all(ranks)


@contextmanager
def ray_groups(peers: int, make: Make = make_scalars) -> Iterator[tuple[Scheduler, TrainerGroup]]:
    """Create ENGINES engines and DP_RANKS x peers trainer ranks as handles of a few processes."""
    config = Config()
    config.cluster.device = "cpu"
    with ray_cluster(config.cluster, {"CPU": 2.0 * PROCESSES}) as [node]:
        watch = Watch()
        engines = [start(ReadyEngine, node, "engine", make) for _ in range(PROCESSES)]
        trainers = [start(SilentTrainer, node, "trainer", peers) for _ in range(PROCESSES)]
        try:
            leaders = [
                EngineHandle(handle.name, handle.actor, number)
                for number, handle in enumerate(_spread(engines, range(ENGINES), watch))
            ]
            nodes = [rank // RANKS_PER_NODE for rank in range(DP_RANKS * peers)]
            # By node, because only the first rank of a node is called.
            ranks_of_trainer = _spread(trainers, nodes, watch)
            # All processes have started before the first step is timed.
            watch.get([process.call(RunProcess.drain_spans) for process in [*engines, *trainers]])
            dp_rank_of = tuple(rank // peers for rank in range(DP_RANKS * peers))
            ranks = RankMap(dp_rank_of, reporting=tuple(range(0, DP_RANKS * peers, peers)))
            fleet = Fleet([Up(number, leader, watch) for number, leader in enumerate(leaders)], watch)
            scheduler = Scheduler(fleet, Config().rollout.max_concurrent_requests)
            yield scheduler, TrainerGroup(ranks_of_trainer, nodes, watch, ranks, Stages())
        finally:
            kill_all([*engines, *trainers])


def start(
    actor: ActorClass, node: PlacementGroupSchedulingStrategy, name: str, *arguments: object
) -> ProcessHandle[Any]:
    return ProcessHandle(name, actor.options(num_cpus=1, scheduling_strategy=node).remote(name, *arguments))


def _spread(processes: list[ProcessHandle[Any]], places: Sequence[int], watch: Watch) -> list[ProcessHandle[Any]]:
    """Return a watched handle for each of `places`. Handles with the same place belong to the same process."""
    shared = [processes[place % len(processes)] for place in places]
    spread = [ProcessHandle[Any](f"{process.name} {index}", process.actor) for index, process in enumerate(shared)]
    for process in spread:
        watch.add(process)
    return spread
