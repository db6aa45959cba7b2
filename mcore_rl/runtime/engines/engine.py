"""One rollout engine of the fleet: start and restart of its processes, on the same nodes each time, and its state."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mcore_rl.engines.hosts import ONE_HOST, EngineHosts
from mcore_rl.runtime.calls import ProcessHandle, Ref
from mcore_rl.runtime.engines.balance import EngineKey
from mcore_rl.runtime.engines.process import EngineActor, EngineProcess, FollowerActor, FollowerProcess
from mcore_rl.runtime.health import Watch, kill_all
from mcore_rl.runtime.roles.base import RunProcess, SetUpContext


@dataclass
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
        """Replace all processes and begin their set-up. Returns the same reference as `set_up`."""
        self.kill()
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
        count = len(self.options)
        names = [self.name, *(f"{self.name}, host {host} of {count}" for host in range(2, count + 1))]
        kinds = [EngineActor, *[FollowerActor] * (count - 1)]
        self.process, *self.followers = [
            ProcessHandle[Any](name, kind.options(**options).remote(name, self.logs, peers))
            for kind, options, name, peers in zip(kinds, self.options, names, self.peers, strict=True)
        ]
        return self.processes
