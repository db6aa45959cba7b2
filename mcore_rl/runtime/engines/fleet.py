"""The rollout engines of a run: their processes, which engines are alive or restarting, and which weights they hold.
The scheduler (scheduler.py) assigns tasks to them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mcore_rl.engines.settings import ONE_HOST, EngineHosts
from mcore_rl.errors import ClusterDiedError, WorkerDiedError
from mcore_rl.resolved.process_plan import engine_names
from mcore_rl.runtime.calls import ProcessHandle, Ref
from mcore_rl.runtime.delivery import ReleasedKeys
from mcore_rl.runtime.engines.balance import EngineKey
from mcore_rl.runtime.engines.process import EngineActor, EngineProcess, FollowerActor, FollowerProcess
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import RunProcess, SetUpContext
from mcore_rl.runtime.roles.groups import drain_spans
from mcore_rl.runtime.roles.places import kill_all
from mcore_rl.runtime.stops import STOPS
from mcore_rl.types import DeviceMemory, Metric, Span, Total, merge_metrics
from mcore_rl.weights.transports.topology import Endpoint

T = TypeVar("T")

PARTS = frozenset({"weights", "kv_cache"})
"""Parts of an engine that sleep."""


@dataclass(eq=False)
class FleetEngine:
    """Processes of one engine, one per host, and its state. `options` (Ray's actor options) and `peers` (number of
    processes that share the host's cores, see RunProcess) have one entry per process. `journals` is the directory of
    the journals of sampled tokens, or None."""

    number: int
    name: str
    options: Sequence[Mapping[str, object]]
    peers: Sequence[int | None]
    watch: Watch
    logs: str
    journals: Path | None
    process: ProcessHandle[EngineProcess] = field(init=False)
    """The process that is called; `followers` on other hosts follow it."""
    followers: list[ProcessHandle[FollowerProcess]] = field(default_factory=list, init=False)
    incarnation: int = field(default=0, init=False)
    """Number of times that the engine was replaced."""
    starting: Ref[None] | None = field(default=None, init=False)
    """Result of the set-up while the engine restarts."""
    deadline: float = field(default=0.0, init=False)
    """Time limit of the restart, by time.monotonic()."""
    has_weights: bool = field(default=True, init=False)
    has_joined: bool = field(default=False, init=False)
    """True after EngineProcess.join_gateway."""
    holds_frozen: bool = field(default=False, init=False)
    """True if the engine has received the weights that training never changes, and has not discarded them."""
    busy_seconds: float = field(default=0.0, init=False)
    """Busy seconds from the engine's last report."""
    _contexts: list[SetUpContext] = field(default_factory=list, init=False)
    """Arguments of the last set-up, per process."""

    def __post_init__(self) -> None:
        """Create the processes without setting them up."""
        for process in self._create():
            self.watch.add(process)

    @property
    def processes(self) -> list[ProcessHandle[RunProcess]]:
        return [self.process, *self.followers]

    @property
    def serves(self) -> bool:
        return self.starting is None and self.has_weights

    @property
    def key(self) -> EngineKey:
        return EngineKey(self.number, self.incarnation)

    @property
    def producer(self) -> str:
        """Name of the current incarnation as a producer of trajectories."""
        return self.producer_of(self.incarnation)

    def producer_of(self, incarnation: int) -> str:
        """Return the name of one incarnation; no other process ever has this name."""
        return f"{self.name} (started {incarnation + 1} times)" if incarnation else self.name

    @property
    def journal(self) -> str | None:
        """File with the tokens that the current incarnation has sampled."""
        # Each incarnation has a file of its own, because other engines read the old one to continue its responses.
        file = f"{self.name.replace(' ', '_')}.{self.incarnation}"
        return None if self.journals is None else str(self.journals / file)

    def set_up(self, context: SetUpContext, visible: Sequence[str | None]) -> Ref[None]:
        """Begin the set-up, after which the engine serves. Returns a reference that is ready when the set-up has ended.
        `visible` are the GPUs that each process may see."""
        self._contexts = [replace(context, visible_devices=devices) for devices in visible]
        return self._set_up()

    def kill(self) -> None:
        """Kill all processes; calls that wait for one of them fail."""
        kill_all(self.processes)

    def replace_processes(self) -> Ref[None]:
        """Replace all processes, which are dead or killed, and begin their set-up. Returns the same reference as
        `set_up`."""
        for before, after in zip(self.processes, self._create(), strict=True):
            self.watch.replace(before, after)
        self.watch.places.ask(self.processes)
        return self._set_up()

    def _set_up(self) -> Ref[None]:
        hosts = self._hosts() if self.followers else ONE_HOST
        first, *others = self._contexts
        ready = self.process.call(EngineProcess.setup, first, hosts, self.journal)
        # `serve` never returns. If its call ends, the thread that steps the engine has failed, even if the process
        # lives.
        self.watch.add_call(self.process, self.process.call(EngineProcess.serve))
        for index, (follower, context) in enumerate(zip(self.followers, others, strict=True), 1):
            follow = follower.call(FollowerProcess.follow, context, replace(hosts, index=index))
            self.watch.add_call(follower, follow)
        return ready

    def _hosts(self) -> EngineHosts:
        addresses = self.watch.get([self.process.call(EngineProcess.free_address) for _ in range(2)])
        rendezvous, commands = map(urlsplit, addresses)
        places = self.watch.get([process.call(RunProcess.where) for process in self.processes])
        names = tuple(host.name for host, _ in places)
        # A new key per start: ranks reject connections without it, such as those from another run or an earlier start.
        key, ports = secrets.token_bytes(32), (int(rendezvous.port or 0), int(commands.port or 0))
        return EngineHosts(names, 0, str(rendezvous.hostname), *ports, key)

    def _create(self) -> list[ProcessHandle[RunProcess]]:
        kinds = [EngineActor, *[FollowerActor] * (len(self.options) - 1)]
        names = engine_names(self.name, len(self.options))
        self.process, *self.followers = [
            ProcessHandle[Any](name, kind.options(**options).remote(name, self.logs, peers))
            for kind, options, name, peers in zip(kinds, self.options, names, self.peers, strict=True)
        ]
        return self.processes


@dataclass
class Fleet:
    """All rollout engines. An engine that dies or hangs restarts while the others work, and receives weights with the
    next update after that."""

    engines: list[FleetEngine]
    watch: Watch
    max_restarts: int = 0
    note: Callable[[str], None] = print
    """Shows a line to the user."""
    make_room: Callable[[], None] | None = None
    """Frees the devices for an engine that starts, which measures their memory; None unless others use them in turns
    with the engines (see DevicePhases)."""
    version: int = field(default=0, init=False)
    """Weight version; every engine that serves has this version or a later one."""
    num_restarts: int = field(default=0, init=False)
    released: ReleasedKeys = field(default_factory=ReleasedKeys, init=False)
    awake: frozenset[str] = field(default=PARTS, init=False)
    """Parts of the engines that are in device memory."""
    _keep_weights: bool = field(default=False, init=False)
    """Argument of the last `sleep`."""
    _metrics: dict[str, Metric] = field(default_factory=dict, init=False)
    lost_journals: dict[str, str] = field(default_factory=dict, init=False)
    """Journal files of lost engines, by producer."""

    @property
    def num_engines(self) -> int:
        return len(self.engines)

    @property
    def asleep(self) -> bool:
        """True if engines cannot generate because a part of them is asleep."""
        return self.awake != PARTS

    @property
    def serving(self) -> list[FleetEngine]:
        return [engine for engine in self.engines if engine.serves]

    def started(self) -> list[FleetEngine]:
        """Return the engines that are not starting; waits if all are."""
        if all(engine.starting is not None for engine in self.engines):
            self.settle()
        return [engine for engine in self.engines if engine.starting is None]

    def producer_of(self, key: EngineKey) -> str:
        return self.engines[key.number].producer_of(key.incarnation)

    def lose(self, engine: FleetEngine, why: str, *, keeps_tokens: bool = True) -> None:
        """Restart an engine; it has no weights then. Without `keeps_tokens`, its journal is removed: wrong weights have
        sampled its tokens, and no engine may continue from them.

        Raises: WorkerDiedError after `max_restarts` restarts; KeyboardInterrupt if a stop was requested, because the
        signal may have gone to all processes.
        """
        STOPS.end()
        if self.num_restarts == self.max_restarts:
            raise WorkerDiedError(f"{why} (rollout.max_engine_restarts={self.max_restarts})")
        self.num_restarts += 1
        self.add_metric("engine/restarts", Total(1))
        first_line = why.splitlines()[0]
        self.note(f"warning: {first_line}; it starts again ({self.num_restarts} of {self.max_restarts} times)")
        # Before the restart, which changes `producer` and the name of the journal.
        if engine.journal is not None and keeps_tokens:
            self.lost_journals[engine.producer] = engine.journal
        elif engine.journal is not None:  # now: its host's gateway names it to another engine when the process ends
            Path(engine.journal).unlink(missing_ok=True)
        # A new incarnation gives the process a new name as a producer, so keys of the lost one are never requested from
        # it.
        engine.incarnation += 1
        engine.busy_seconds, engine.has_weights, engine.holds_frozen, engine.has_joined = 0.0, False, False, False
        engine.kill()  # first: ranks that wait for it cannot free their devices
        if self.make_room is not None:
            self.make_room()
        engine.starting, engine.deadline = engine.replace_processes(), self.watch.start_deadline()

    def is_lost(self, engine: FleetEngine) -> bool:
        """Return whether some process of the engine has died; waits a few seconds for the death to be reported."""
        if not self._reasons(engine):
            self.watch.blame_the_dead(engine.processes)  # the death of another process explains nothing here
        return bool(self._reasons(engine))

    def failed(self) -> list[FleetEngine]:
        """Return the engines with a process that was lost since the last `reap_failed`."""
        if not self.watch.lost:
            return []
        return [engine for engine in self.engines if self._reasons(engine)]

    def _reasons(self, engine: FleetEngine) -> list[str]:
        """Return the reasons why processes of the engine are lost."""
        return [self.watch.lost[process] for process in engine.processes if process in self.watch.lost]

    def reap_failed(self) -> None:
        """Restart failed engines."""
        for engine in self.failed():
            self.lose(engine, self._reasons(engine)[0])

    def settle(self) -> None:
        """Restart failed engines, and wait until every engine is up. Restarted engines are asleep like the others."""

        def wait() -> None:
            for engine in self.engines:
                if engine.starting is not None:
                    self.watch.get_started({engine.starting: engine.processes})
                    self._put_to_sleep_like_others(engine)
                    engine.starting = None

        # An engine may have died while it started: restart it before waiting for it.
        self.reap_failed()
        self.retry_on_engine_loss(wait)

    def up(self) -> list[FleetEngine]:
        """Return the engines that can receive weights. Waits for starting engines only if all are starting, or if
        their devices are needed by trainer ranks, which load the weights that they send."""
        if self.make_room is not None:
            self.settle()
            return self.engines

        def look() -> None:
            for engine in self.engines:
                if engine.starting is not None and self.watch.has_started(
                    engine.starting, engine.processes, engine.deadline
                ):
                    engine.starting = None

        self.reap_failed()
        self.retry_on_engine_loss(look)
        return self.started()

    def retry_on_engine_loss(self, call: Callable[[], T]) -> T:
        """Call `call`, again after every loss of an engine, and return its result.

        Raises: errors of `call` that no loss explains.
        """
        while True:
            before = self.num_restarts
            try:
                return call()
            except ClusterDiedError:  # without Ray's daemons, no engine can be restarted
                raise
            except WorkerDiedError:
                self.watch.blame_the_dead()
                self.reap_failed()
                if self.num_restarts == before:  # `call` may have replaced an engine itself
                    raise

    def mark_supplied(self, engines: Sequence[FleetEngine]) -> None:
        """Record that these engines have the current weights."""
        for engine in engines:
            if not engine.has_weights:
                self.note(f"{engine.name} is up again, with the weights of version {self.version}")
            engine.has_weights = True

    def endpoints(self) -> list[Endpoint]:
        """Return the weight endpoints of all engine ranks, engine by engine."""
        calls = [engine.process.call(EngineProcess.endpoints) for engine in self.engines]
        return [endpoint for of_engine in self.watch.get(calls) for endpoint in of_engine]

    def sleep(self, keep_weights: bool) -> int:
        """Free the memory of every engine; returns the bytes freed by all of them."""
        if not keep_weights:  # before the calls: some engines may have slept when one is lost
            for engine in self.engines:
                engine.holds_frozen = False
        released = sum(self._on_every_engine(lambda process: process.call(EngineProcess.sleep, keep_weights)))
        self.awake, self._keep_weights = frozenset(), keep_weights
        return released

    def wake_up(self, part: str) -> None:
        """Restore "weights" or "kv_cache" on every engine."""
        self._on_every_engine(lambda process: process.call(EngineProcess.wake_up, part))
        self.awake |= {part}

    def device_memory(self) -> list[DeviceMemory | None]:
        """Measure the memory of every engine rank's GPU; None for a rank on a CPU. Empty if an engine is lost."""
        # A lost engine is not restarted here: while the others sleep it would be awake, and trainer ranks load their
        # state next.
        up = [engine for engine in self.engines if engine.starting is None]
        try:
            by_engine = self.watch.get([engine.process.call(EngineProcess.device_memory) for engine in up])
        except ClusterDiedError:
            raise
        except WorkerDiedError:
            self.watch.blame_the_dead()
            if not self.failed():
                raise
            return []
        return [memory for of_engine in by_engine for memory in of_engine]

    def _put_to_sleep_like_others(self, engine: FleetEngine) -> None:
        """Free the memory of an engine that has just started, which is awake, except for the parts that are awake in
        all engines."""
        if self.asleep:
            self.watch.get([engine.process.call(EngineProcess.sleep, self._keep_weights)])
            for part in sorted(self.awake):
                self.watch.get([engine.process.call(EngineProcess.wake_up, part)])

    def _on_every_engine(self, begin: Callable[[ProcessHandle[EngineProcess]], Ref[T]]) -> list[T]:
        """Call every engine and return the results. Waits until all are up: a starting engine takes memory that others
        use."""

        def call() -> list[T]:
            self.settle()
            return self.watch.get([begin(engine.process) for engine in self.engines])

        return self.retry_on_engine_loss(call)

    def add_metric(self, name: str, metric: Metric) -> None:
        self._metrics = merge_metrics([self._metrics, {name: metric}])

    def take_metrics(self) -> dict[str, Metric]:
        """Return the metrics since the last call: idle fraction of the engines, restarts, tokens of lost engines from
        which others continued, and requests that idle engines took from others."""
        metrics, self._metrics = self._metrics, {}
        none = dict.fromkeys(("engine/restarts", "engine/tokens_taken_over", "engine/requests_stolen"), Total(0))
        return {**none, **metrics}

    def spans(self) -> list[Span]:
        self.reap_failed()
        return self.retry_on_engine_loss(
            lambda: drain_spans(self.watch, [engine.process for engine in self.engines if engine.starting is None])
        )
