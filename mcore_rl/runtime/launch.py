"""Places and sets up the processes of a run, and takes them down again whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from mcore_rl.config.schema import Config
from mcore_rl.runtime.cluster import ray_cluster, uses_cuda
from mcore_rl.runtime.groups import CriticGroup, EnginePool, RankMap, TrainerGroup
from mcore_rl.runtime.health import Watch, kill_all
from mcore_rl.runtime.hosts import Host, check_one_host, this_host
from mcore_rl.runtime.phases import shares_device
from mcore_rl.runtime.placement import Placement, place
from mcore_rl.runtime.processes import CriticProcess, EngineProcess, TrainerProcess
from mcore_rl.types import Batch

PLACE = "scheduling_strategy"


@dataclass
class Processes:
    """The trainer ranks and, in reinforcement learning, the rollout engines and the critic's ranks, if it has one."""

    trainers: TrainerGroup
    engines: EnginePool | None
    critic: CriticGroup | None = None


@dataclass(frozen=True)
class CriticRanks:
    """What a critic's processes are made of; `own_batch` as in CriticGroup."""

    ranks: RankMap
    own_batch: Callable[[Batch], Batch]


@contextlib.contextmanager
def launch(
    config: Config, trainers: RankMap, prompts: dict[str, Any], critic: CriticRanks | None = None
) -> Iterator[Processes]:
    """Starts Ray and every process, waits until all are set up, and kills all of them when the block ends.

    `prompts` are the prompt sets that engines serve, by name; without any, there are no engines.
    """
    on_gpus = uses_cuda(config.cluster)
    num_engines, num_critics = (
        config.rollout.num_engines if prompts else 0,
        len(critic.ranks.dp_rank_of) if critic else 0,
    )
    placement = place(config, on_gpus=on_gpus, num_engines=num_engines, num_critics=num_critics)
    with ray_cluster(config, placement.bundle) as nodes, _started(config, placement, nodes, on_gpus) as started:
        watch, ranks, critics, engines = started
        if engines:
            check_one_host([("driver", this_host()), *_hosts(watch, ranks, engines)])
        address = watch.get([ranks[0].free_address.remote()])[0]
        references = {name: ray.put(prompt_set) for name, prompt_set in prompts.items()}
        starting = [
            engine.setup.remote(config, slot.devices, references)
            for engine, slot in zip(engines, placement.engines, strict=True)
        ]
        pool = EnginePool(engines, watch) if engines else None
        if pool is not None and shares_device(config):
            # An engine measures what is free when it starts: the ranks come once it sleeps.
            watch.get(starting)
            pool.sleep(keep_weights=False)
        starting += [rank.setup.remote(config, index, len(ranks), address) for index, rank in enumerate(ranks)]
        if critics:
            # A critic's rank leaves the device when it is set up, if it is to leave at all.
            address = watch.get([critics[0].free_address.remote()])[0]
            starting += [
                rank.setup.remote(config, index, len(critics), address, slot.devices)
                for index, (rank, slot) in enumerate(zip(critics, placement.critics, strict=True))
            ]
        watch.get(starting)
        group = CriticGroup(critics, critic.ranks, watch, critic.own_batch) if critic else None
        yield Processes(TrainerGroup(ranks, trainers, watch), pool, group)


@contextlib.contextmanager
def _started(
    config: Config, placement: Placement, nodes: list[Any], on_gpus: bool
) -> Iterator[tuple[Watch, list[Any], list[Any], list[Any]]]:
    """The processes, each on its node, before any set-up: what watches them, the ranks, the critic's, the engines."""
    watch = Watch()
    handles: list[Any] = []
    rank_options = {"num_cpus": 1, "num_gpus": 1 if on_gpus else 0}
    # A colocated engine shares its GPUs with trainer ranks, which already own them in Ray's books.
    owns_gpus = on_gpus and config.cluster.placement == "disaggregated"
    engine_options = {"num_cpus": config.rollout.tp, "num_gpus": config.rollout.tp if owns_gpus else 0}
    try:
        ranks = [
            _start(TrainerProcess, f"trainer rank {rank}", watch, handles, rank_options | {PLACE: nodes[node]})
            for rank, node in enumerate(placement.ranks)
        ]
        # In Ray's books the GPUs of the critic's ranks are those of the policy's.
        critics = [
            _start(CriticProcess, f"critic rank {rank}", watch, handles, {"num_cpus": 1, PLACE: nodes[slot.node]})
            for rank, slot in enumerate(placement.critics)
        ]
        engines = [
            _start(EngineProcess, f"rollout engine {index}", watch, handles, engine_options | {PLACE: nodes[slot.node]})
            for index, slot in enumerate(placement.engines)
        ]
        yield watch, ranks, critics, engines
    finally:
        kill_all(handles)


def _start(process: Any, name: str, watch: Watch, handles: list[Any], options: dict[str, Any]) -> Any:
    handle = process.options(**options).remote(name)
    handles.append(handle)
    watch.add(name, handle)
    return handle


def _hosts(watch: Watch, ranks: list[Any], engines: list[Any]) -> list[tuple[str, Host]]:
    """Where every process is."""
    names = [f"trainer rank {rank}" for rank in range(len(ranks))]
    names += [f"rollout engine {index}" for index in range(len(engines))]
    found = watch.get([handle.where.remote() for handle in [*ranks, *engines]])
    return [(name, host) for name, (host, _) in zip(names, found, strict=True)]
