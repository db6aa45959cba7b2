"""Placement, set-up and shutdown of the processes of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mcore_rl.config.rules.engine_support import sglang_keys
from mcore_rl.config.rules.rollout import concurrent_episodes
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.placement import Guests, RunPlacement, visible_devices
from mcore_rl.resolved.process_plan import PlannedProcess, ProcessPlan, plan_processes
from mcore_rl.rollout.gateway.wire import GatewayAddress
from mcore_rl.runtime.addresses import missing_interface
from mcore_rl.runtime.agreement import HostFacts, check_hosts, named_paths
from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.cores import shares_cores
from mcore_rl.runtime.daemons import Daemons
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.gateway import GatewayActor, GatewayProcess, HostMemory, gateways_started
from mcore_rl.runtime.health import Starts, Watch
from mcore_rl.runtime.isolation.choice import check_remote_host
from mcore_rl.runtime.output import ray_output_to
from mcore_rl.runtime.phases import Stages, takes_turns
from mcore_rl.runtime.progress.polls import shown_set_up
from mcore_rl.runtime.roles.base import RunProcess, SetUpContext
from mcore_rl.runtime.roles.groups import RankMap, Role, RoleGroup
from mcore_rl.runtime.roles.places import Places, kill_all
from mcore_rl.runtime.roles.trainer import TrainerActor, TrainerGroup, TrainerProcess
from mcore_rl.runtime.stack_dumps import StackRequests
from mcore_rl.weights.transports.hosts import this_host

if TYPE_CHECKING:
    from ray.actor import ActorClass
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass(frozen=True)
class RunProcesses:
    """Trainer ranks and, in reinforcement learning, rollout engines. `groups` has the groups of the other roles by
    configuration section."""

    trainers: TrainerGroup
    engines: Fleet | None
    groups: dict[str, RoleGroup]


@dataclass(frozen=True)
class EngineProcesses:
    """Rollout engines and the groups of other roles, by configuration section, of a run without trainer ranks."""

    engines: Fleet
    groups: dict[str, RoleGroup]


@contextlib.contextmanager
def launch(
    config: Config,
    trainers: RankMap,
    prompts: Mapping[str, PromptSource],
    roles: Sequence[Role],
    stages: Stages,
    *,
    logs: Path,
    show: Callable[[str], None] = lambda line: None,
) -> Iterator[RunProcesses]:
    """Start Ray and all processes, wait until they are set up, and kill them when the block ends.

    `prompts` are the prompt sets that engines serve, by name; without any, there are no engines. `stages` times the
    calls to the groups. `logs`: existing folder for the output of the processes. `show` prints a line of progress.
    """
    cluster, rollout = config.cluster, config.rollout
    plan = plan_processes(config, guests_of(roles), with_engines=bool(prompts))
    with (
        _journals(Path(config.run.dir), rollout, config.actor.moe.router_replay) as journals,
        _cluster(config, plan, logs, show) as starter,
    ):
        watch, nodes = starter.watch, plan.placement.ranks
        ranks = starter.create(TrainerActor, plan.ranks, num_gpus=int(cluster.uses_cuda))
        groups = {role.guests.section: starter.group(role, stages) for role in roles}
        fleet = starter.fleet(rollout.max_engine_restarts, journals)
        gateways = starter.gateways()
        processes = RunProcesses(TrainerGroup(ranks, nodes, watch, trainers, stages), fleet, groups)
        starter.begin(config, show)
        with gateways_started(gateways, config, starter.programs(rollout), watch) as addresses:
            with shown_set_up(stages.board, watch) as begun:
                _set_up(_context(config, prompts, addresses), plan.placement, roles, processes, show, begun)
            yield processes


@contextlib.contextmanager
def launch_engines(
    config: Config,
    prompts: Mapping[str, PromptSource],
    roles: Sequence[Role],
    stages: Stages,
    *,
    logs: Path,
    show: Callable[[str], None] = lambda line: None,
) -> Iterator[EngineProcesses]:
    """Start Ray, the rollout engines and the processes of `roles`, without trainer ranks, wait until they are set up,
    and kill them when the block ends.

    Engines load model.hf_path. An engine that is lost is not restarted, since nobody could send it weights. The
    processes of `roles` have no GPUs; the other arguments are as in `launch`.
    """
    plan = plan_processes(config, guests_of(roles), with_engines=True, with_trainers=False)
    with _cluster(config, plan, logs, show) as starter:
        groups = {role.guests.section: starter.group(role, stages) for role in roles}
        fleet, gateways = starter.fleet(0, None), starter.gateways()
        assert fleet is not None, "the plan has engines"
        starter.begin(config, show)
        with gateways_started(gateways, config, starter.programs(config.rollout), starter.watch) as addresses:
            context = replace(_context(config, prompts, addresses), loads_weights=True)
            starting: Starts = {}
            for engine in fleet.engines:
                # Ray has set the GPUs that each process may see.
                starting[engine.set_up(context, [None] * len(engine.processes))] = engine.processes
            for group in groups.values():
                starting |= group.set_up(context, [""] * len(group.processes))
            starter.watch.get_started(starting)
            show("engines and other models ready" if roles else f"{_count(fleet.num_engines, 'rollout engine')} ready")
            yield EngineProcesses(fleet, groups)


@contextlib.contextmanager
def _cluster(config: Config, plan: ProcessPlan, logs: Path, show: Callable[[str], None]) -> Iterator[_Starter]:
    """Start or join Ray and yield the starter of the planned processes. All processes that it has created are killed
    when the block ends."""
    if problem := missing_interface():
        raise ConfigError(problem)
    cluster = config.cluster
    # Call this before `ray_cluster` sets OMP_NUM_THREADS: `shares_cores` would take it for the user's setting.
    several_threads, stacks = shares_cores(config), StackRequests()
    with contextlib.ExitStack() as at_the_end:
        at_the_end.enter_context(ray_output_to(logs))
        at_the_end.enter_context(stacks.listening(logs))
        # Only now: users may send SIGUSR2 after this line (docs/diagnostics.md).
        show("starting Ray" if cluster.address is None else f"joining the Ray cluster at {cluster.address}")
        nodes = at_the_end.enter_context(ray_cluster(cluster, plan.placement.bundle))
        watch = Watch(
            daemons=Daemons.started(),
            timeout_seconds=cluster.collective_timeout_seconds,
            start_seconds=cluster.start_timeout_seconds,
            places=Places(str(logs)),
            stacks=stacks,
        )
        at_the_end.callback(lambda: kill_all(list(watch.processes.values())))
        yield _Starter(plan, nodes, watch, str(logs), several_threads)


def _context(
    config: Config, prompts: Mapping[str, PromptSource], gateways: Mapping[HostMemory, GatewayAddress]
) -> SetUpContext:
    references = {name: ray.put(prompt_set) for name, prompt_set in prompts.items()}
    return SetUpContext(config, references, gateways=gateways)


def guests_of(roles: Sequence[Role]) -> dict[str, Guests]:
    """Return the guests of the roles by the name of their processes, the argument of `plan_processes`."""
    return {role.name: role.guests for role in roles}


def _set_up(
    context: SetUpContext,
    placement: RunPlacement,
    roles: Sequence[Role],
    processes: RunProcesses,
    show: Callable[[str], None],
    begun: Callable[[Starts], None],
) -> None:
    """Set up all processes, and return when all are ready. On GPUs, processes that share them are set up one after the
    other: engines measure the free memory, and other models keep less memory after their set-up than during it. All
    other set-ups run concurrently. `begun` receives set-ups when they begin."""
    trainers, watch, config = processes.trainers, processes.trainers.watch, context.config
    engines = [] if processes.engines is None else processes.engines.engines
    num_ranks, engines_ready = len(trainers.processes), f"{_count(len(engines), 'rollout engine')} ready"
    devices = trainers.call(TrainerProcess.visible_devices).results() if config.cluster.uses_cuda else []
    starting: Starts = {}
    for engine, slots in zip(engines, placement.engines, strict=True):
        # Ray numbers the GPUs of a node in its own order, so a colocated engine gets the devices that its ranks report.
        visible = [visible_devices(placement, slot, devices) for slot in slots]
        starting[engine.set_up(context, visible)] = engine.processes
    begun(starting)
    in_turns = processes.engines is not None and takes_turns(config)
    if processes.engines is not None and in_turns:
        # Rollout engines measure the free memory when they start: ranks and other engines start after they sleep.
        watch.get_started(starting)
        processes.engines.sleep(keep_weights=False)
        show(engines_ready)
        starting = {}
    for role in sorted(roles, key=lambda role: role.guests.tp is None):  # engines first
        section = role.guests.section
        visible = [visible_devices(placement, slot, devices) for slot in placement.guests[section]]
        set_ups = processes.groups[section].set_up(context, visible)
        begun(set_ups)
        if devices or (in_turns and role.guests.tp is not None):
            # These processes share the ranks' GPUs even if rollout engines do not.
            watch.get_started(set_ups)
        starting |= set_ups
    of_ranks = trainers.set_up(context, [None] * num_ranks)
    begun(of_ranks)
    watch.get(list(of_ranks))
    show(f"{_count(num_ranks, 'trainer rank')} ready")
    if any(slot.places for slots in placement.guests.values() for slot in slots):
        trainers.stages.free_cache = trainers.free_cache
    watch.get_started(starting)
    if starting:
        show("engines and other models ready" if roles else engines_ready)
    # Not earlier: if an engine cannot be set up, every restart would fail, too.
    if processes.engines is not None and processes.engines.max_restarts:
        watch.allow_failure(process for engine in engines for process in engine.processes)


@dataclass(frozen=True)
class _Starter:
    """Creates processes, each on its node, without setting them up.

    nodes: scheduling strategy of each node. several_threads: divide the cores of a node among the processes that
    compute there at the same time.
    """

    plan: ProcessPlan
    nodes: Sequence[PlacementGroupSchedulingStrategy]
    watch: Watch
    logs: str
    several_threads: bool

    def begin(self, config: Config, show: Callable[[str], None]) -> None:
        """Locate the created processes and check their hosts, before they are set up."""
        self.watch.places.ask(list(self.watch.processes.values()))
        show(f"setting up {_counted(self.plan)}")
        _check_hosts(config, self.watch)

    def create(
        self, actor: ActorClass, planned: Sequence[PlannedProcess], **options: float
    ) -> list[ProcessHandle[Any]]:
        """Create the planned processes, with Ray's `options`."""
        processes = []
        for each in planned:
            node = self.nodes[each.node]
            placed = actor.options(**{"num_cpus": each.num_cpus, **options}, scheduling_strategy=node)
            remote = placed.remote(each.name, self.logs, self._peers(each))
            processes.append(ProcessHandle[Any](each.name, remote))
            self.watch.add(processes[-1])
        return processes

    def group(self, role: Role, stages: Stages) -> RoleGroup:
        planned = self.plan.guests[role.guests.section]
        return role.group(self.create(role.actor, planned), [each.node for each in planned], self.watch, stages)

    def fleet(self, max_restarts: int, journals: Path | None) -> Fleet | None:
        """Create all engines. Colocated engines and processes of other roles share GPUs that Ray assigns to trainer
        ranks, so they reserve none."""
        engines = []
        for number, hosts in enumerate(self.plan.engines):
            options = [
                {"num_cpus": each.num_cpus, "num_gpus": each.num_gpus, "scheduling_strategy": self.nodes[each.node]}
                for each in hosts
            ]
            peers = [self._peers(each) for each in hosts]
            engines.append(FleetEngine(number, hosts[0].name, options, peers, self.watch, self.logs, journals))
        return Fleet(engines, self.watch, max_restarts) if engines else None

    def gateways(self) -> list[ProcessHandle[GatewayProcess]]:
        return self.create(GatewayActor, self.plan.gateways)

    def programs(self, rollout: RolloutConfig) -> int:
        """Return the maximum number of programs of a host at a time: one per episode of its engines."""
        leading = Counter(hosts[0].node for hosts in self.plan.engines)
        return concurrent_episodes(rollout) * max(leading.values(), default=1)

    def _peers(self, planned: PlannedProcess) -> int | None:
        return planned.peers if self.several_threads else None


@contextlib.contextmanager
def _journals(run_dir: Path, rollout: RolloutConfig, router_replay: str) -> Iterator[Path | None]:
    """Yield the directory of the engines' journals, and remove it after the block. Other engines continue the responses
    of a lost engine from its journal.

    Yields None without restarts, or if routed experts are recorded: they are not in the journal, so other engines could
    not continue the responses. They generate them again.
    """
    if not rollout.max_engine_restarts or router_replay == "engine":
        yield None
        return
    directory = run_dir / "journals"
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _check_hosts(config: Config, watch: Watch) -> None:
    """Compare all hosts with the driver's host, and add the host to the names of processes. In a cluster that the run
    has joined, check that no other users are logged in on any host. One process per host is queried.

    Raises: ConfigError naming the host.
    """
    cluster, processes = config.cluster, list(watch.processes.values())
    checks_users = cluster.address is not None and cluster.isolation != "none"
    if cluster.nodes == 1 and not checks_users:
        return
    hosts = [host for host, _ in watch.get([process.call(RunProcess.where) for process in processes])]
    # A host is identified by its /dev/shm, so containers of one machine are checked separately.
    one_per_host = {host.memory: (host, process) for host, process in zip(hosts, processes, strict=True)}
    if cluster.nodes > 1:
        for host, process in zip(hosts, processes, strict=True):
            process.name = f"{process.name} on {host.name}"
        others = [process for host, process in one_per_host.values() if host != this_host()]
        paths = named_paths(config)

        def ask(mark: Path) -> list[HostFacts]:
            return watch.get([process.call(RunProcess.host_facts, paths, mark) for process in others])

        uses_sglang = bool(sglang_keys(config.algorithm, config.rollout, config.judge))
        check_hosts(config.run.dir, paths, ask, uses_sglang=uses_sglang)
    if checks_users:
        users = watch.get([process.call(RunProcess.other_users) for _, process in one_per_host.values()])
        for (host, _), names in zip(one_per_host.values(), users, strict=True):
            check_remote_host(cluster.isolation, host.name, names)


def _counted(plan: ProcessPlan) -> str:
    """Return, for example, `2 trainer ranks, 1 rollout engine, 1 judge process`."""
    counts = {"trainer rank": len(plan.ranks), "rollout engine": len(plan.engines)}
    counts |= {f"{section} process": len(planned) for section, planned in plan.guests.items()}
    return ", ".join(_count(number, noun) for noun, number in counts.items() if number)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
