"""Places of the processes of a run: their hosts, their log files, and how they ended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError

from mcore_rl.processes.exits import Exits
from mcore_rl.runtime.output import log_file
from mcore_rl.runtime.roles.origins import first_line
from mcore_rl.weights.transports.hosts import this_host

# Ray's words for a process that ended itself by SystemExit.
_EXIT_CODE = re.compile(r"[Ee]xit code:? (\d+)")


@dataclass
class Places:
    """`logs` is the directory of log files; None: unknown."""

    logs: str | None = None
    _calls: dict[Any, Any] = field(default_factory=dict, init=False)
    """Handles by the call that asks for the place, while it runs."""
    _hosts: dict[int, str] = field(default_factory=dict, init=False)
    """By id of the handle."""
    _exits: Exits = field(default_factory=Exits, init=False)

    def ask(self, handles: Sequence[Any]) -> None:
        """Ask processes where they run, without waiting; `update` takes the answers."""
        self._calls |= {handle.where.remote(): handle for handle in handles}

    def update(self) -> None:
        """Take the answers that have come. It does not wait."""
        if not self._calls:
            return
        ended, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for call in ended:
            handle = self._calls.pop(call)
            with contextlib.suppress(RayError):  # it is dead
                host, pid = ray.get(call)
                self._hosts[id(handle)] = host.name
                if host == this_host():
                    self._exits.follow(id(handle), pid)

    def forget(self, handle: Any) -> None:
        """Drop a process that was replaced."""
        self._hosts.pop(id(handle), None)
        self._exits.forget(id(handle))

    def death(self, handle: Any, name: str, error: RayError) -> str:
        """`killed by SIGKILL (host node3, log logs/trainer_rank_1.log)`, for the process `name` whose call failed with
        `error`."""
        self.update()
        how = self._exits.status(id(handle))
        if how is None:
            how = _from_ray(error)
        elif isinstance(error, OutOfMemoryError):  # Ray itself has killed it
            how = f"{how}; {first_line(error)}"
        host = self._hosts.get(id(handle))
        # On several hosts the name has the host already.
        where = [] if host is None or name.endswith(f" on {host}") else [f"host {host}"]
        if self.logs is not None:
            where.append(f"log {log_file(Path(self.logs), name.partition(' on ')[0])}")
        return f"{how} ({', '.join(where)})" if where else how


def _from_ray(error: RayError) -> str:
    """The exit code, where Ray knows it, else the first line of its message."""
    found = _EXIT_CODE.search(str(error))
    return f"exit code {found[1]}" if found is not None else first_line(error)
