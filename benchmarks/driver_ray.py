"""Real Ray handles for benchmarks.driver: processes that answer at once, seen through the run's own groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from benchmarks.driver_load import DP_RANKS, ENGINES, make_scalars, write_records
from mcore_rl.config.schema import Config
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.health import Watch, kill_all
from mcore_rl.runtime.roles.base import RankMap, RankProcess, RunProcess
from mcore_rl.runtime.roles.delivery import Wanted
from mcore_rl.runtime.roles.engine import EnginePool
from mcore_rl.runtime.roles.trainer import TrainerGroup
from mcore_rl.types import Mean, Metric, RankShare, RolloutScalars, RolloutTask

PROCESSES = 2


@ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)
class ReadyEngine(RunProcess):
    """Answers a task with ready scalars, and keeps nothing."""

    def run(self, task: RolloutTask, forget: list[int]) -> tuple[int, RolloutScalars]:
        write_records(Path(str(task.records)).parents[1], task)
        return 0, make_scalars(task)


@ray.remote(concurrency_groups={"watch": 2}, max_restarts=0)
class SilentTrainer(RankProcess):
    """Takes its share of a batch of several updates, and does nothing with it. What it was to fetch it only counts:
    fetching is the ranks' work, and the engines'."""

    def fetch(self, wanted: Wanted) -> Any:
        return len(wanted.rows)

    def recompute_logp(self, key: int, shares: list[RankShare], fetched: int) -> dict[str, Metric]:
        assert fetched == len({sample for share in shares for sample in share.samples.tolist()})
        self.num_updates = len(shares)
        return {"rollout/logp_diff_mean": Mean(0.0, self.num_updates)}

    def update(self, key: int) -> list[dict[str, Metric]]:
        return [{"actor/loss": Mean(0.0, 1)} for _ in range(self.num_updates)]


@contextmanager
def ray_groups(peers: int) -> Iterator[tuple[EnginePool, TrainerGroup]]:
    """ENGINES engines and DP_RANKS x peers trainer ranks, all of them handles of a few processes."""
    config = Config()
    config.cluster.device = "cpu"
    with ray_cluster(config, {"CPU": 2.0 * PROCESSES}) as [node]:
        watch = Watch()
        engines = [_start(ReadyEngine, "engine", node) for _ in range(PROCESSES)]
        trainers = [_start(SilentTrainer, "trainer", node) for _ in range(PROCESSES)]
        try:
            engine_handles = _spread(engines, ENGINES, watch)
            trainer_handles = _spread(trainers, DP_RANKS * peers, watch)
            watch.get([handle.drain_spans.remote() for handle in [*engines, *trainers]])
            dp_rank_of = tuple(rank // peers for rank in range(DP_RANKS * peers))
            ranks = RankMap(dp_rank_of, speakers=tuple(range(0, DP_RANKS * peers, peers)))
            yield EnginePool(engine_handles, watch), TrainerGroup(trainer_handles, ranks, watch)
        finally:
            kill_all([*engines, *trainers])


def _start(process: Any, name: str, node: Any) -> Any:
    return process.options(num_cpus=1, scheduling_strategy=node).remote(name)


def _spread(processes: list[Any], count: int, watch: Watch) -> list[Any]:
    """`count` handles, each watched as in a run, of the few processes."""
    handles = [processes[index % len(processes)] for index in range(count)]
    for index, handle in enumerate(handles):
        watch.add(f"process {index}", handle)
    return handles
