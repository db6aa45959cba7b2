"""Places and sets up the processes of a run, and takes them down again whatever happens."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from mcore_rl.config.rules.defaults import uses_cuda
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.placement import Placement, place, visible_devices
from mcore_rl.runtime.addresses import missing_interface
from mcore_rl.runtime.agreement import HostFacts, Question, check_hosts
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.cores import shares_cores
from mcore_rl.runtime.daemons import Daemons
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.start import EngineStart
from mcore_rl.runtime.health import Watch, kill_all
from mcore_rl.runtime.isolation.choice import check_remote_host
from mcore_rl.runtime.output import ray_output_to
from mcore_rl.runtime.phases import shares_device
from mcore_rl.runtime.roles.base import RankMap, Role, Surroundings
from mcore_rl.runtime.roles.places import Places
from mcore_rl.runtime.roles.trainer import TrainerGroup, TrainerProcess
from mcore_rl.weights.transports.hosts import this_host

PLACE = "scheduling_strategy"


@dataclass
class Processes:
    """The trainer ranks and, in reinforcement learning, the rollout engines; `groups` are those of the roles beside
    them, by the section that configures each."""

    trainers: TrainerGroup
    engines: Fleet | None
    groups: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Handles:
    """Of all processes; `beside` by section."""

    watch: Watch
    ranks: list[Any]
    engines: list[EngineStart]
    beside: dict[str, list[Any]]


@contextlib.contextmanager
def launch(
    config: Config,
    trainers: RankMap,
    prompts: dict[str, Any],
    roles: Sequence[Role] = (),
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Processes]:
    """Starts Ray and every process, waits until all are set up, and kills all of them when the block ends.

    `prompts` are the prompt sets that engines serve, by name; without any, there are no engines. `say` tells a person
    what has started.
    """
    if problem := missing_interface():
        raise ConfigError(problem)
    on_gpus = uses_cuda(config.cluster)
    num_engines = config.rollout.num_engines if prompts else 0
    placement = place(config, on_gpus=on_gpus, num_engines=num_engines, guests=[role.guests for role in roles])
    say("starting Ray" if config.cluster.address is None else f"joining the Ray cluster at {config.cluster.address}")
    with (
        ray_output_to(Path(config.run.logs)),
        ray_cluster(config, placement.bundle) as nodes,
        _started(config, placement, roles, nodes, on_gpus, shares_cores(config)) as started,
    ):
        say(f"setting up {_counted(started)}")
        if config.cluster.nodes > 1:
            _check_hosts(config, started.watch)
        if config.cluster.address is not None and config.cluster.isolation != "none":
            _check_users(config, started.watch)
        fleet = _set_up(config, placement, prompts, roles, started, say)
        groups = {}
        for role in roles:
            section = role.guests.section
            nodes_of_role = [slot.node for slot in placement.guests[section]]
            groups[section] = role.group(started.beside[section], nodes_of_role, started.watch)
        yield Processes(TrainerGroup(started.ranks, placement.ranks, trainers, started.watch), fleet, groups)


def _set_up(
    config: Config,
    placement: Placement,
    prompts: dict[str, Any],
    roles: Sequence[Role],
    started: _Handles,
    say: Callable[[str], None],
) -> Fleet | None:
    """Everything at once, but what measures free memory that others would take meanwhile; returns when all is ready."""
    watch, ranks, engines = started.watch, started.ranks, started.engines
    address = watch.get([ranks[0].free_address.remote()])[0]
    of_ranks = watch.get([rank.visible_devices.remote() for rank in ranks]) if uses_cuda(config.cluster) else []
    references = {name: ray.put(prompt_set) for name, prompt_set in prompts.items()}
    starting = _set_up_engines(engines, config, placement, references, of_ranks)
    fleet = _fleet(engines, config, watch) if engines else None
    takes_turns = fleet is not None and shares_device(config)
    if fleet is not None and takes_turns:
        # An engine measures what is free when it starts: the next one, and the ranks, come once it sleeps.
        watch.get_started(starting)
        fleet.sleep(keep_weights=False)
        say(f"{_count(len(engines), 'rollout engine')} ready")
    around = Surroundings(config, references, watch)
    starting |= _set_up_roles(roles, around, placement, started, of_ranks, takes_turns=takes_turns)
    watch.get([rank.setup.remote(config, index, len(ranks), address) for index, rank in enumerate(ranks)])
    say(f"{_count(len(ranks), 'trainer rank')} ready")
    watch.get_started(starting)
    if len(starting) and not (takes_turns and len(starting) == len(engines)):
        say("engines and models beside them ready" if roles else f"{_count(len(engines), 'rollout engine')} ready")
    if config.rollout.max_engine_restarts:
        watch.let_die([handle for engine in engines for handle in engine.handles])
    return fleet


def _set_up_roles(
    roles: Sequence[Role],
    around: Surroundings,
    placement: Placement,
    started: _Handles,
    of_ranks: list[str],
    *,
    takes_turns: bool,
) -> dict[Any, Sequence[Any]]:
    """As _set_up_engines, of the roles beside them."""
    starting: dict[Any, Sequence[Any]] = {}
    for role in sorted(roles, key=lambda role: role.guests.tp is None):  # engines first
        section = role.guests.section
        visible = [visible_devices(placement, slot, of_ranks) for slot in placement.guests[section]]
        handles = started.beside[section]
        set_ups = role.set_up(around, handles, visible)
        of_role = {ready: [handle] for ready, handle in zip(set_ups, handles, strict=True)}
        if (takes_turns or of_ranks) and role.guests.tp is not None:
            started.watch.get_started(of_role)  # disaggregated, they share the GPUs of the ranks all the same
        starting |= of_role
    return starting


@contextlib.contextmanager
def _started(
    config: Config, placement: Placement, roles: Sequence[Role], nodes: list[Any], on_gpus: bool, several_threads: bool
) -> Iterator[_Handles]:
    """The processes, each on its node, before any set-up."""
    cluster = config.cluster
    watch = Watch(
        daemons=Daemons.started(),
        timeout_seconds=cluster.collective_timeout_seconds,
        start_seconds=cluster.start_timeout_seconds,
        places=Places(config.run.logs),
    )
    handles: list[Any] = []
    logs, journals = config.run.logs, _journals(config)
    rank_options = {"num_cpus": 1, "num_gpus": 1 if on_gpus else 0}

    def peers(section: str, node: int) -> int | None:
        return placement.peers(section, node) if several_threads else None

    try:
        ranks = [
            _start(
                TrainerProcess,
                f"trainer rank {rank}",
                watch,
                handles,
                rank_options | {PLACE: nodes[node]},
                (logs, peers("actor", node)),
            )
            for rank, node in enumerate(placement.ranks)
        ]
        beside = {
            role.guests.section: [
                _start(
                    role.process,
                    f"{role.name} {index}",
                    watch,
                    handles,
                    {"num_cpus": role.guests.num_cpus, PLACE: nodes[slot.node]},
                    (logs, peers(role.guests.section, slot.node)),
                )
                for index, slot in enumerate(placement.guests[role.guests.section])
            ]
            for role in roles
        }
        engines = []
        for index, slots in enumerate(placement.engines):
            options = [_engine_options(config, len(slots), on_gpus) | {PLACE: nodes[slot.node]} for slot in slots]
            sharing = [peers("rollout", slot.node) for slot in slots]
            engine = EngineStart(f"rollout engine {index}", options, sharing, watch, handles, logs, journals)
            engine.create()
            engines.append(engine)
        watch.places.ask(handles)
        yield _Handles(watch, ranks, engines, beside)
    finally:
        kill_all(handles)
        if journals is not None:
            shutil.rmtree(journals, ignore_errors=True)


def _engine_options(config: Config, num_hosts: int, on_gpus: bool) -> dict[str, Any]:
    """Of Ray, for an engine's process on each of its hosts. One that is colocated shares its GPUs with trainer ranks,
    which own them in Ray's books; so do the processes of roles beside them."""
    size = config.rollout.tp // num_hosts
    owns_gpus = on_gpus and config.cluster.placement == "disaggregated"
    return {"num_cpus": size, "num_gpus": size if owns_gpus else 0}


def _journals(config: Config) -> Path | None:
    """Where engines keep what they draw for those who take over from them; a response without its experts cannot go on
    elsewhere."""
    if not config.rollout.max_engine_restarts or config.actor.moe.router_replay == "engine":
        return None
    return Path(config.run.dir) / "journals"


def _check_hosts(config: Config, watch: Watch) -> None:
    """Messages name the host of a process from here on.

    Raises: ConfigError where hosts have not the same.
    """
    handles = list(watch.handles.values())
    hosts = [host for host, _ in watch.get([handle.where.remote() for handle in handles])]
    watch.name_hosts([host.name for host in hosts])
    others = {host.memory: handle for host, handle in zip(hosts, handles, strict=True) if host != this_host()}

    def ask(question: Question) -> list[HostFacts]:
        """One process on each host but the driver's."""
        facts: list[HostFacts] = watch.get([handle.host_facts.remote(question) for handle in others.values()])
        return facts

    check_hosts(config, ask)


def _check_users(config: Config, watch: Watch) -> None:
    """Ask one process per host which other users are logged in there.

    Raises: ConfigError naming the host.
    """
    handles = list(watch.handles.values())
    hosts = [host for host, _ in watch.get([handle.where.remote() for handle in handles])]
    asked = {host.memory: (host.name, handle) for host, handle in zip(hosts, handles, strict=True)}
    users = watch.get([handle.other_users.remote() for _, handle in asked.values()])
    for (name, _), others in zip(asked.values(), users, strict=True):
        check_remote_host(config, name, others)


def _set_up_engines(
    engines: Sequence[EngineStart], config: Config, placement: Placement, prompts: dict[str, Any], of_ranks: list[str]
) -> dict[Any, Sequence[Any]]:
    """References of the end of each engine's set-up, with its processes; `of_ranks`: the GPUs of trainer ranks."""
    starting: dict[Any, Sequence[Any]] = {}
    for engine, slots in zip(engines, placement.engines, strict=True):
        visible = [visible_devices(placement, slot, of_ranks) for slot in slots]
        starting[engine.set_up(config, prompts, visible)] = engine.handles
    return starting


def _fleet(engines: Sequence[EngineStart], config: Config, watch: Watch) -> Fleet:
    fleet_engines = [FleetEngine(index, engine) for index, engine in enumerate(engines)]
    return Fleet(fleet_engines, watch, config.rollout.max_engine_restarts)


def _start(
    process: Any, name: str, watch: Watch, handles: list[Any], options: dict[str, Any], given: tuple[str, int | None]
) -> Any:
    """`given`: as RunProcess takes it, after the name."""
    handle = process.options(**options).remote(name, *given)
    handles.append(handle)
    watch.add(name, handle)
    return handle


def _counted(started: _Handles) -> str:
    """`2 trainer ranks, 1 rollout engine, 1 judge process`."""
    parts = [_count(len(started.ranks), "trainer rank"), _count(len(started.engines), "rollout engine")]
    parts += [_count(len(handles), f"{section} process") for section, handles in started.beside.items()]
    return ", ".join(part for part in parts if not part.startswith("0 "))


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
