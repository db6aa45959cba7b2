"""Starts the processes of one rollout engine, the first time and, when they are lost, again in the same place."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mcore_rl.config.schema import Config
from mcore_rl.engines.hosts import ONE_HOST, EngineHosts
from mcore_rl.runtime.engines.process import EngineProcess, FollowerProcess
from mcore_rl.runtime.health import Watch, kill_all


@dataclass
class EngineStart:
    """`options` of Ray for its process on each of its hosts, the leader's first, and how many `peers` have equal parts
    of that host's cores (see RunProcess). `of_run` collects the processes of the run, which are killed when it ends.
    What the engine draws is kept in `journals`, None: nowhere."""

    name: str
    options: Sequence[dict[str, Any]]
    peers: Sequence[int | None]
    watch: Watch
    of_run: list[Any]
    logs: str
    journals: Path | None
    handles: list[Any] = field(default_factory=list, init=False)
    """Of the processes that are there now, the leader's first."""
    _starts: int = field(default=0, init=False)
    _given: tuple[Config, dict[str, Any], Sequence[str | None]] | None = field(default=None, init=False)

    def create(self) -> None:
        """The processes, before any set-up."""
        self.handles = self._created()
        for name, handle in zip(self._names(), self.handles, strict=True):
            self.watch.add(name, handle)

    def set_up(self, config: Config, prompts: dict[str, Any], visible: Sequence[str | None]) -> Any:
        """A reference of the end of its set-up; it serves from then on. `prompts` are references of prompt sets by
        name, `visible` the GPUs that each process may see."""
        self._given = config, prompts, visible
        leader, followers, hosts = self.handles[0], self.handles[1:], ONE_HOST
        if followers:
            addresses = self.watch.get([leader.free_address.remote() for _ in range(2)])
            meeting, commands = map(urlsplit, addresses)
            places = self.watch.get([process.where.remote() for process in self.handles])
            names = tuple(host.name for host, _ in places)
            key, ports = secrets.token_bytes(32), (int(meeting.port or 0), int(commands.port or 0))
            hosts = EngineHosts(names, 0, str(meeting.hostname), *ports, key)
        ready = leader.setup.remote(config, visible[0], prompts, hosts, self.journal)
        self.watch.add_call(leader, leader.serve.remote())
        for index, (follower, devices) in enumerate(zip(followers, visible[1:], strict=True), 1):
            self.watch.add_call(follower, follower.follow.remote(config, devices, replace(hosts, index=index)))
        return ready

    @property
    def journal(self) -> str | None:
        """File of what it has drawn since it started."""
        if self.journals is None:
            return None
        return str(self.journals / f"{self.name.replace(' ', '_')}.{self._starts}")

    def kill(self) -> None:
        """Kill all its processes; whoever waits for one of them learns it."""
        kill_all(self.handles)

    def again(self) -> Any:
        """Others in the place of all its processes; as `set_up`. The journal is another one."""
        assert self._given is not None, "an engine that was never set up cannot start again"
        self._starts += 1
        self.kill()
        lost, self.handles = self.handles, self._created()
        for before, after in zip(lost, self.handles, strict=True):
            self.of_run.remove(before)
            self.watch.replace(before, after)
        self.watch.places.ask(self.handles)
        return self.set_up(*self._given)

    def _created(self) -> list[Any]:
        kinds: list[Any] = [EngineProcess, *[FollowerProcess] * (len(self.options) - 1)]
        handles = [
            kind.options(**options).remote(name, self.logs, peers)
            for kind, options, name, peers in zip(kinds, self.options, self._names(), self.peers, strict=True)
        ]
        self.of_run += handles
        return handles

    def _names(self) -> list[str]:
        count = len(self.options)
        return [self.name, *(f"{self.name}, host {host} of {count}" for host in range(2, count + 1))]
