"""Places of the processes of a run: their hosts, their log files, and how they ended."""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.exceptions import OutOfMemoryError, RayError

from mcore_rl.processes.exits import Exits
from mcore_rl.runtime.calls import ProcessHandle, Ref
from mcore_rl.runtime.daemons import pid_is_alive
from mcore_rl.runtime.output import log_file
from mcore_rl.runtime.roles.base import RunProcess
from mcore_rl.runtime.roles.origins import first_line
from mcore_rl.weights.transports.hosts import Host, this_host

# Ray's message for a process that ended itself by SystemExit.
_EXIT_CODE = re.compile(r"[Ee]xit code:? (\d+)")


@dataclass
class Places:
    """Hosts, log files and exit statuses of processes. `logs` is the directory of log files; None: unknown."""

    logs: str | None = None
    _calls: dict[Ref[tuple[Host, int]], ProcessHandle[RunProcess]] = field(default_factory=dict, init=False)
    """Pending calls of RunProcess.where."""
    _found: dict[ProcessHandle[RunProcess], tuple[Host, int]] = field(default_factory=dict, init=False)
    """Hosts and process ids."""
    _exits: Exits = field(default_factory=Exits, init=False)

    def ask(self, processes: Sequence[ProcessHandle[RunProcess]]) -> None:
        """Request the places of processes without waiting; `update` receives the results."""
        self._calls |= {process.call(RunProcess.where): process for process in processes}

    def update(self) -> None:
        """Receive the results that have arrived, without waiting."""
        if not self._calls:
            return
        ended, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for call in ended:
            process = self._calls.pop(call)
            with contextlib.suppress(RayError):  # the process is dead
                host, pid = ray.get(call)
                self._found[process] = host, pid
                # The kernel reports exit statuses only of processes on this host.
                if host == this_host():
                    self._exits.follow(id(process), pid)

    def members(
        self, processes: Sequence[ProcessHandle[RunProcess]]
    ) -> dict[Host, dict[ProcessHandle[RunProcess], int]]:
        """Return the process ids of processes by host, without processes whose place is unknown."""
        members: dict[Host, dict[ProcessHandle[RunProcess], int]] = defaultdict(dict)
        for process in processes:
            if process in self._found:
                host, pid = self._found[process]
                members[host][process] = pid
        return dict(members)

    def forget(self, process: ProcessHandle[RunProcess]) -> None:
        """Drop a process that was replaced."""
        self._found.pop(process, None)
        self._exits.forget(id(process))

    def death(self, process: ProcessHandle[RunProcess], error: RayError) -> str:
        """Describe how a process died whose call failed with `error`, such as `killed by SIGKILL`."""
        self.update()
        how = self._exits.status(id(process))
        if how is None:
            found = _EXIT_CODE.search(str(error))
            return first_line(error) if found is None else f"exit code {found[1]}"
        # Ray's memory monitor killed it.
        return f"{how}; {first_line(error)}" if isinstance(error, OutOfMemoryError) else how

    def described(self, processes: Sequence[ProcessHandle[RunProcess]]) -> str:
        """Describe the places of processes: ` (host node3, log logs/trainer_rank_1.log)`; "" if unknown."""
        places = [place for process in processes if (place := self._described(process))]
        return f" ({'; '.join(places)})" if places else ""

    def _described(self, process: ProcessHandle[RunProcess]) -> str:
        host, _ = self._found.get(process, (None, 0))
        # In a run with several hosts, the name contains the host.
        where = [] if host is None or process.name.endswith(f" on {host.name}") else [f"host {host.name}"]
        if self.logs is not None:
            where.append(f"log {log_file(Path(self.logs), process.name.partition(' on ')[0])}")
        return ", ".join(where)


def kill_all(processes: Sequence[ProcessHandle[RunProcess]], seconds: float = 10.0) -> None:
    """Kill processes at once and wait, up to `seconds`, until those on this host are gone."""
    calls = [process.call(RunProcess.where) for process in processes]
    # Processes that are dead or do not answer are killed below too, but their ids stay unknown.
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=1) if calls else ([], [])
    pids = []
    for call in answered:
        with contextlib.suppress(RayError):
            host, pid = ray.get(call)
            pids += [pid] if host == this_host() else []
    for process in processes:
        ray.kill(process.actor, no_restart=True)
    deadline = time.monotonic() + seconds
    while any(pid_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
