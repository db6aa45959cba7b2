"""Start and restart of the processes of one rollout engine, on the same nodes each time."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mcore_rl.engines.hosts import ONE_HOST, EngineHosts
from mcore_rl.runtime.calls import ProcessHandle, Ref
from mcore_rl.runtime.engines.process import EngineActor, EngineProcess, FollowerActor, FollowerProcess
from mcore_rl.runtime.health import Watch, kill_all
from mcore_rl.runtime.roles.base import RunProcess, SetUpContext

if TYPE_CHECKING:
    from mcore_rl.runtime.roles.groups import ActorOptions


@dataclass
class EngineStart:
    """Processes of one engine, one per host; the first is the leader. `options` (Ray's actor options) and `peers`
    (number of processes that share the host's cores, see RunProcess) have one entry per process. `journals` is the
    directory of the journals of sampled tokens, or None."""

    name: str
    options: Sequence[ActorOptions]
    peers: Sequence[int | None]
    watch: Watch
    logs: str
    journals: Path | None
    leader: ProcessHandle[EngineProcess] = field(init=False)
    followers: list[ProcessHandle[FollowerProcess]] = field(default_factory=list, init=False)
    _starts: int = field(default=0, init=False)
    _contexts: list[SetUpContext] = field(default_factory=list, init=False)
    """Arguments of the last set-up, per process."""

    def __post_init__(self) -> None:
        """Create the processes without setting them up."""
        for process in self._create():
            self.watch.add(process)

    @property
    def processes(self) -> list[ProcessHandle[RunProcess]]:
        return [self.leader, *self.followers]

    @property
    def journal(self) -> str | None:
        """File with the tokens that the engine has sampled since it started."""
        if self.journals is None:
            return None
        return str(self.journals / f"{self.name.replace(' ', '_')}.{self._starts}")

    def set_up(self, context: SetUpContext, visible: Sequence[str | None]) -> Ref[None]:
        """Begin the set-up, after which the engine serves. Returns a reference that is ready when the set-up has ended.
        `visible` are the GPUs that each process may see."""
        self._contexts = [replace(context, visible_devices=devices) for devices in visible]
        return self._set_up()

    def _set_up(self) -> Ref[None]:
        hosts = self._hosts() if self.followers else ONE_HOST
        first, *others = self._contexts
        ready = self.leader.call(EngineProcess.setup, first, hosts, self.journal)
        # `serve` never returns. If its call ends, the thread that steps the engine has failed, even if the process
        # lives.
        self.watch.add_call(self.leader, self.leader.call(EngineProcess.serve))
        for index, (follower, context) in enumerate(zip(self.followers, others, strict=True), 1):
            follow = follower.call(FollowerProcess.follow, context, replace(hosts, index=index))
            self.watch.add_call(follower, follow)
        return ready

    def kill(self) -> None:
        """Kill all processes; calls that wait for one of them fail."""
        kill_all(self.processes)

    def again(self) -> Ref[None]:
        """Replace all processes and begin their set-up, with a new journal. Returns the same reference as `set_up`."""
        # The next journal is a new file, because other engines read the old one to continue its responses.
        self._starts += 1
        self.kill()
        for before, after in zip(self.processes, self._create(), strict=True):
            self.watch.replace(before, after)
        self.watch.places.ask(self.processes)
        return self._set_up()

    def _hosts(self) -> EngineHosts:
        addresses = self.watch.get([self.leader.call(EngineProcess.free_address) for _ in range(2)])
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
        self.leader, *self.followers = [
            ProcessHandle[Any](name, kind.options(**options).remote(name, self.logs, peers))
            for kind, options, name, peers in zip(kinds, self.options, names, self.peers, strict=True)
        ]
        return self.processes
