"""Places and sets up the processes of a run, and takes them down again whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from mcore_rl.config import num_trainer_ranks
from mcore_rl.config.schema import Config
from mcore_rl.runtime.cluster import uses_cuda
from mcore_rl.runtime.groups import EnginePool, TrainerGroup
from mcore_rl.runtime.health import Watch, kill_all
from mcore_rl.runtime.phases import shares_device
from mcore_rl.runtime.processes import EngineProcess, TrainerProcess


@dataclass
class Processes:
    """The trainer ranks and, in reinforcement learning, the rollout engines."""

    trainers: TrainerGroup
    engines: EnginePool | None


@contextlib.contextmanager
def launch(config: Config, dp_rank_of: list[int], prompts: dict[str, Any]) -> Iterator[Processes]:
    """Starts every process, waits until all are set up, and kills all of them when the block ends.

    `dp_rank_of[rank]` is each trainer rank's data-parallel coordinate. `prompts` are the prompt sets that engines
    serve, by name; without any, there are no engines.
    """
    watch = Watch()
    handles: list[Any] = []
    try:
        ranks = [
            _start(TrainerProcess, f"trainer rank {rank}", watch, handles, _trainer_options(config))
            for rank in range(num_trainer_ranks(config))
        ]
        engines = [
            _start(EngineProcess, f"rollout engine {index}", watch, handles, _engine_options(config))
            for index in range(config.rollout.num_engines if prompts else 0)
        ]
        address = watch.get([ranks[0].free_address.remote()])[0]
        references = {name: ray.put(prompt_set) for name, prompt_set in prompts.items()}
        starting = [
            engine.setup.remote(config, _visible_devices(config, index), references)
            for index, engine in enumerate(engines)
        ]
        pool = EnginePool(engines, watch) if engines else None
        if pool is not None and shares_device(config):
            # An engine measures what is free when it starts: the ranks come once it sleeps.
            watch.get(starting)
            pool.sleep(keep_weights=False)
        starting += [rank.setup.remote(config, index, len(ranks), address) for index, rank in enumerate(ranks)]
        watch.get(starting)
        yield Processes(TrainerGroup(ranks, dp_rank_of, watch), pool)
    finally:
        kill_all(handles)


def _start(process: Any, name: str, watch: Watch, handles: list[Any], options: dict[str, Any]) -> Any:
    handle = process.options(**options).remote(name)
    handles.append(handle)
    watch.add(name, handle)
    return handle


def _trainer_options(config: Config) -> dict[str, Any]:
    return {"num_cpus": 1, "num_gpus": 1 if uses_cuda(config.cluster) else 0}


def _engine_options(config: Config) -> dict[str, Any]:
    # A colocated engine shares its GPUs with trainer ranks, which already own them in Ray's books.
    owns_gpus = uses_cuda(config.cluster) and config.cluster.placement == "disaggregated"
    return {"num_cpus": config.rollout.tp, "num_gpus": config.rollout.tp if owns_gpus else 0}


def _visible_devices(config: Config, engine: int) -> list[int] | None:
    """GPUs of a colocated engine on its node; None: what Ray assigned, or CPU."""
    if not uses_cuda(config.cluster) or config.cluster.placement == "disaggregated":
        return None
    first = engine * config.rollout.tp % config.cluster.gpus_per_node
    return list(range(first, first + config.rollout.tp))
