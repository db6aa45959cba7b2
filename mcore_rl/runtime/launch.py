"""Placement, set-up and shutdown of the processes of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from mcore_rl.config.rules.defaults import uses_cuda
from mcore_rl.config.schema import Config
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.placement import RunPlacement, place, visible_devices
from mcore_rl.runtime.addresses import missing_interface
from mcore_rl.runtime.agreement import HostFacts, Question, check_hosts
from mcore_rl.runtime.calls import ProcessCalls, Ref
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.cores import shares_cores
from mcore_rl.runtime.daemons import Daemons
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.start import EngineStart
from mcore_rl.runtime.health import AnyRef, Watch, kill_all
from mcore_rl.runtime.isolation.choice import check_remote_host
from mcore_rl.runtime.output import ray_output_to
from mcore_rl.runtime.phases import shares_device
from mcore_rl.runtime.roles.groups import RankMap
from mcore_rl.runtime.roles.places import Places
from mcore_rl.runtime.roles.role import ActorOptions, Group, Role, SetUpContext
from mcore_rl.runtime.roles.trainer import TrainerActor, TrainerCalls, TrainerGroup
from mcore_rl.weights.transports.hosts import this_host

if TYPE_CHECKING:
    from ray.actor import ActorClass
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

Starts = dict[AnyRef, Sequence[ProcessCalls]]
"""References to the ends of set-ups that have begun, with the processes that take part in each."""


@dataclass
class Processes:
    """Trainer ranks and, in reinforcement learning, rollout engines. `groups` has the groups of the other roles by
    configuration section."""

    trainers: TrainerGroup
    engines: Fleet | None
    groups: dict[str, Group] = field(default_factory=dict)


@dataclass(frozen=True)
class _Started:
    """All processes before their set-up. `others` has the other roles, by configuration section."""

    watch: Watch
    ranks: list[ProcessCalls]
    engines: list[EngineStart]
    others: dict[str, list[ProcessCalls]]


@contextlib.contextmanager
def launch(
    config: Config,
    trainers: RankMap,
    prompts: Mapping[str, PromptSource],
    roles: Sequence[Role] = (),
    *,
    show: Callable[[str], None] = lambda line: None,
) -> Iterator[Processes]:
    """Start Ray and all processes, wait until they are set up, and kill them when the block ends.

    `prompts` are the prompt sets that engines serve, by name; without any, there are no engines. `show` prints a
    line of progress.
    """
    if problem := missing_interface():
        raise ConfigError(problem)
    on_gpus = uses_cuda(config.cluster)
    num_engines = config.rollout.num_engines if prompts else 0
    placement = place(config, on_gpus=on_gpus, num_engines=num_engines, guests=[role.guests for role in roles])
    show("starting Ray" if config.cluster.address is None else f"joining the Ray cluster at {config.cluster.address}")
    with (
        ray_output_to(Path(config.run.logs)),
        ray_cluster(config, placement.bundle) as nodes,
        _started(config, placement, roles, nodes, on_gpus, shares_cores(config)) as started,
    ):
        show(f"setting up {_counted(started)}")
        if config.cluster.nodes > 1:
            _check_hosts(config, started.watch)
        if config.cluster.address is not None and config.cluster.isolation != "none":
            _check_users(config, started.watch)
        fleet = _set_up(config, placement, prompts, roles, started, show)
        groups = {}
        for role in roles:
            section = role.guests.section
            nodes_of_role = [slot.node for slot in placement.guests[section]]
            groups[section] = role.group(started.others[section], nodes_of_role, started.watch)
        yield Processes(TrainerGroup(started.ranks, placement.ranks, trainers, started.watch), fleet, groups)


def _set_up(
    config: Config,
    placement: RunPlacement,
    prompts: Mapping[str, PromptSource],
    roles: Sequence[Role],
    started: _Started,
    show: Callable[[str], None],
) -> Fleet | None:
    """Set up all processes, and return when all are ready. Set-ups run concurrently, except where an engine measures
    the free memory of a device that other processes also use."""
    watch, engines = started.watch, started.engines
    trainers = TrainerCalls(started.ranks, placement.ranks, watch)
    address = watch.get([started.ranks[0].free_address()])[0]
    devices = trainers.visible_devices().results() if uses_cuda(config.cluster) else []
    references = {name: ray.put(prompt_set) for name, prompt_set in prompts.items()}
    starting = _set_up_engines(engines, config, placement, references, devices)
    fleet = _fleet(engines, config, watch) if engines else None
    takes_turns = fleet is not None and shares_device(config)
    if fleet is not None and takes_turns:
        # An engine measures the free memory when it starts: other engines and ranks start after it sleeps.
        watch.get_started(starting)
        fleet.sleep(keep_weights=False)
        show(f"{_count(len(engines), 'rollout engine')} ready")
    context = SetUpContext(config, references, watch)
    starting |= _set_up_roles(roles, context, placement, started, devices, takes_turns=takes_turns)
    watch.get(trainers.setup(config, address))
    show(f"{_count(len(started.ranks), 'trainer rank')} ready")
    watch.get_started(starting)
    if len(starting) and not (takes_turns and len(starting) == len(engines)):
        show("engines and other models ready" if roles else f"{_count(len(engines), 'rollout engine')} ready")
    # Not before: an engine that cannot be set up would only fail again after each restart.
    if config.rollout.max_engine_restarts:
        watch.allow_failure([process for engine in engines for process in engine.processes])
    return fleet


def _set_up_roles(
    roles: Sequence[Role],
    context: SetUpContext,
    placement: RunPlacement,
    started: _Started,
    devices: list[str],
    *,
    takes_turns: bool,
) -> Starts:
    """Begin the set-ups of all roles. `devices`: the GPUs of trainer ranks."""
    starting: Starts = {}
    for role in sorted(roles, key=lambda role: role.guests.tp is None):  # engines first
        visible = [visible_devices(placement, slot, devices) for slot in placement.guests[role.guests.section]]
        processes = started.others[role.guests.section]
        set_ups = role.set_up(context, processes, visible)
        of_role: Starts = {ready: [process] for ready, process in zip(set_ups, processes, strict=True)}
        if (takes_turns or devices) and role.guests.tp is not None:
            started.watch.get_started(of_role)  # these engines share the ranks' GPUs even if rollout engines do not
        starting |= of_role
    return starting


@contextlib.contextmanager
def _started(
    config: Config,
    placement: RunPlacement,
    roles: Sequence[Role],
    nodes: list[PlacementGroupSchedulingStrategy],
    on_gpus: bool,
    several_threads: bool,
) -> Iterator[_Started]:
    """Create the processes, each on its node, without any set-up."""
    cluster = config.cluster
    watch = Watch(
        daemons=Daemons.started(),
        timeout_seconds=cluster.collective_timeout_seconds,
        start_seconds=cluster.start_timeout_seconds,
        places=Places(config.run.logs),
    )
    processes: list[ProcessCalls] = []
    logs, journals = config.run.logs, _journals(config)

    def peers(section: str, node: int) -> int | None:
        return placement.peers(section, node) if several_threads else None

    def start(actor: ActorClass, name: str, section: str, node: int, options: ActorOptions) -> ProcessCalls:
        options = {**options, "scheduling_strategy": nodes[node]}
        process = ProcessCalls(actor.options(**options).remote(name, logs, peers(section, node)))
        processes.append(process)
        watch.add(name, process)
        return process

    try:
        rank_options: ActorOptions = {"num_cpus": 1, "num_gpus": 1 if on_gpus else 0}
        ranks = [
            start(TrainerActor, f"trainer rank {rank}", "actor", node, rank_options)
            for rank, node in enumerate(placement.ranks)
        ]
        others = {
            role.guests.section: [
                start(
                    role.actor,
                    f"{role.name} {index}",
                    role.guests.section,
                    slot.node,
                    {"num_cpus": role.guests.num_cpus},
                )
                for index, slot in enumerate(placement.guests[role.guests.section])
            ]
            for role in roles
        }
        engines = []
        for index, slots in enumerate(placement.engines):
            options = _engine_options(config, len(slots), on_gpus)
            of_hosts: list[ActorOptions] = [{**options, "scheduling_strategy": nodes[slot.node]} for slot in slots]
            sharing = [peers("rollout", slot.node) for slot in slots]
            engine = EngineStart(f"rollout engine {index}", of_hosts, sharing, watch, processes, logs, journals)
            engine.create()
            engines.append(engine)
        watch.places.ask(processes)
        yield _Started(watch, ranks, engines, others)
    finally:
        kill_all(processes)
        if journals is not None:
            shutil.rmtree(journals, ignore_errors=True)


def _engine_options(config: Config, num_hosts: int, on_gpus: bool) -> ActorOptions:
    """Return Ray's options for an engine's process on each of its hosts. Colocated engines and processes of other roles
    share GPUs that Ray assigns to trainer ranks, so they reserve none."""
    size = config.rollout.tp // num_hosts
    owns_gpus = on_gpus and config.cluster.placement == "disaggregated"
    return {"num_cpus": size, "num_gpus": size if owns_gpus else 0}


def _journals(config: Config) -> Path | None:
    """Return the directory of the engines' journals, from which other engines continue. None without restarts, and if
    routed experts are recorded: the journal has none, so other engines cannot continue the responses."""
    if not config.rollout.max_engine_restarts or config.actor.moe.router_replay == "engine":
        return None
    return Path(config.run.dir) / "journals"


def _check_hosts(config: Config, watch: Watch) -> None:
    """Compare the hosts, and add the host to the names of processes.

    Raises: ConfigError if hosts differ.
    """
    processes = list(watch.processes.values())
    hosts = [host for host, _ in watch.get([process.where() for process in processes])]
    watch.name_hosts([host.name for host in hosts])
    others = {host.memory: process for host, process in zip(hosts, processes, strict=True) if host != this_host()}

    def ask(question: Question) -> list[HostFacts]:
        """Query one process on each host except the driver's."""
        return watch.get([process.host_facts(question) for process in others.values()])

    check_hosts(config, ask)


def _check_users(config: Config, watch: Watch) -> None:
    """Check one process per host for other users who are logged in.

    Raises: ConfigError naming the host.
    """
    processes = list(watch.processes.values())
    hosts = [host for host, _ in watch.get([process.where() for process in processes])]
    asked = {host.memory: (host.name, process) for host, process in zip(hosts, processes, strict=True)}
    users = watch.get([process.other_users() for _, process in asked.values()])
    for (name, _), others in zip(asked.values(), users, strict=True):
        check_remote_host(config, name, others)


def _set_up_engines(
    engines: Sequence[EngineStart],
    config: Config,
    placement: RunPlacement,
    prompts: Mapping[str, Ref[PromptSource]],
    devices: list[str],
) -> Starts:
    """Begin the set-ups of all engines. `devices`: the GPUs of trainer ranks."""
    starting: Starts = {}
    for engine, slots in zip(engines, placement.engines, strict=True):
        visible = [visible_devices(placement, slot, devices) for slot in slots]
        starting[engine.set_up(config, prompts, visible)] = engine.processes
    return starting


def _fleet(engines: Sequence[EngineStart], config: Config, watch: Watch) -> Fleet:
    fleet_engines = [FleetEngine(number, engine) for number, engine in enumerate(engines)]
    return Fleet(fleet_engines, watch, config.rollout.max_engine_restarts)


def _counted(started: _Started) -> str:
    """Return, for example, `2 trainer ranks, 1 rollout engine, 1 judge process`."""
    parts = [_count(len(started.ranks), "trainer rank"), _count(len(started.engines), "rollout engine")]
    parts += [_count(len(processes), f"{section} process") for section, processes in started.others.items()]
    return ", ".join(part for part in parts if not part.startswith("0 "))


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
