"""Start and restart of the processes of one rollout engine, on the same nodes each time."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mcore_rl.config.schema import Config
from mcore_rl.data.transcripts import PromptSource
from mcore_rl.engines.hosts import ONE_HOST, EngineHosts
from mcore_rl.runtime.calls import ProcessCalls, Ref
from mcore_rl.runtime.engines.calls import EngineCalls, FollowerCalls
from mcore_rl.runtime.engines.process import EngineActor, FollowerActor
from mcore_rl.runtime.health import Watch, kill_all

if TYPE_CHECKING:
    from mcore_rl.runtime.roles.role import ActorOptions


@dataclass
class EngineStart:
    """Processes of one engine, one per host; the first is the leader. `options` are Ray's, and `peers` the numbers of
    processes that share the cores (see RunProcess). `of_run` lists all processes of the run, which are killed when it
    ends. `journals` is the directory of the journals of sampled tokens; None: no journals."""

    name: str
    options: Sequence[ActorOptions]
    peers: Sequence[int | None]
    watch: Watch
    of_run: list[ProcessCalls]
    logs: str
    journals: Path | None
    leader: EngineCalls = field(init=False)
    followers: list[FollowerCalls] = field(default_factory=list, init=False)
    _starts: int = field(default=0, init=False)
    _arguments: tuple[Config, Mapping[str, Ref[PromptSource]], Sequence[str | None]] | None = field(
        default=None, init=False
    )
    """Arguments of the last set-up."""

    @property
    def processes(self) -> list[ProcessCalls]:
        return [self.leader, *self.followers]

    @property
    def journal(self) -> str | None:
        """File with the tokens that the engine has sampled since it started."""
        if self.journals is None:
            return None
        return str(self.journals / f"{self.name.replace(' ', '_')}.{self._starts}")

    def create(self) -> None:
        """Create the processes without setting them up."""
        self._create()
        for name, process in zip(self._names(), self.processes, strict=True):
            self.watch.add(name, process)

    def set_up(
        self, config: Config, prompts: Mapping[str, Ref[PromptSource]], visible: Sequence[str | None]
    ) -> Ref[None]:
        """Begin the set-up, after which the engine serves; returns a reference of its end. `visible` are the GPUs that
        each process may see."""
        self._arguments = config, prompts, visible
        hosts = self._hosts() if self.followers else ONE_HOST
        ready = self.leader.setup(config, visible[0], prompts, hosts, self.journal)
        self.watch.add_call(self.leader, self.leader.serve())
        for index, (follower, devices) in enumerate(zip(self.followers, visible[1:], strict=True), 1):
            self.watch.add_call(follower, follower.follow(config, devices, replace(hosts, index=index)))
        return ready

    def kill(self) -> None:
        """Kill all processes; calls that wait for one of them fail."""
        kill_all(self.processes)

    def again(self) -> Ref[None]:
        """Replace all processes and begin their set-up, with a new journal; returns a reference of its end."""
        assert self._arguments is not None, "an engine that was never set up cannot start again"
        self._starts += 1
        self.kill()
        lost = self.processes
        self._create()
        for before, after in zip(lost, self.processes, strict=True):
            self.of_run.remove(before)
            self.watch.replace(before, after)
        self.watch.places.ask(self.processes)
        return self.set_up(*self._arguments)

    def _hosts(self) -> EngineHosts:
        addresses = self.watch.get([self.leader.free_address() for _ in range(2)])
        rendezvous, commands = map(urlsplit, addresses)
        places = self.watch.get([process.where() for process in self.processes])
        names = tuple(host.name for host, _ in places)
        key, ports = secrets.token_bytes(32), (int(rendezvous.port or 0), int(commands.port or 0))
        return EngineHosts(names, 0, str(rendezvous.hostname), *ports, key)

    def _create(self) -> None:
        kinds = [EngineActor, *[FollowerActor] * (len(self.options) - 1)]
        leader, *followers = [
            kind.options(**options).remote(name, self.logs, peers)
            for kind, options, name, peers in zip(kinds, self.options, self._names(), self.peers, strict=True)
        ]
        self.leader, self.followers = EngineCalls(leader), [FollowerCalls(follower) for follower in followers]
        self.of_run += self.processes

    def _names(self) -> list[str]:
        count = len(self.options)
        return [self.name, *(f"{self.name}, host {host} of {count}" for host in range(2, count + 1))]
