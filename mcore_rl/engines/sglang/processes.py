"""Processes of an SGLang engine's ranks: start, remote calls and termination, from the project's environment.

Calls go over a Unix socket in a directory of mode 0700, or over TCP if the engine spans hosts. Both require a key,
because messages are pickled: whoever connects can run code. The key is passed in the environment, never on a command
line.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil

from mcore_rl.config.rules.available import SGLANG_PYTHON, sglang_python
from mcore_rl.engines.hosts import ONE_HOST, EngineHosts
from mcore_rl.engines.sglang.rank import KEY_VARIABLE
from mcore_rl.engines.sglang.settings import RankSettings, disable_nagle
from mcore_rl.errors import ConfigError, WorkerDiedError
from mcore_rl.processes.tree import kill_tree, marked, new_mark

ROOT = Path(__file__).parents[3]
_MAX_SOCKET_PATH = 100


class RankProcesses:
    """All ranks of one engine.

    settings: of rank 0; `rank` and `init_method` are set here for each rank.
    name: of the engine, for messages.
    hosts: ranks on other hosts than the first are started there (follower.follow).

    The start has no deadline here; the caller has one.
    Raises: ConfigError if SGLang rejects the settings; WorkerDiedError if a rank ends during the start.
    """

    def __init__(
        self, settings: RankSettings, name: str, timeout_seconds: float, hosts: EngineHosts = ONE_HOST
    ) -> None:
        self._hosts = hosts
        self._name, self.timeout_seconds = name, timeout_seconds
        self._lost: str | None = None
        self._directory = tempfile.mkdtemp(prefix="mcore_rl_sglang_")  # mode 0700
        self._processes: list[subprocess.Popen[bytes]] = []
        self._mark = new_mark()
        try:
            self._pipes = self._start(settings)
            self.vocab_size: int = self._answers("start", math.inf, refused=ConfigError)[0]
        except BaseException:
            self.end()
            raise
        shutil.rmtree(self._directory)  # all ranks are connected

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of SteppedScheduler on all ranks. Returns the results by rank.

        Raises: a rank's McoreRLError; WorkerDiedError if a rank fails, ends, or does not answer in time, and in every
        later call.
        """
        if self._lost is not None:
            raise WorkerDiedError(self._lost)
        for pipe in self._pipes:
            try:
                pipe.send((method, arguments))
            except OSError:
                continue  # the rank has ended; reading its answer raises the error
        return self._answers(method, self.timeout_seconds)

    def end(self) -> None:
        end_ranks(self._processes, self._mark)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, settings: RankSettings) -> list[Connection]:
        address, init_method, key = self._addresses()
        with self._listener(address, settings.num_ranks, key) as listener:
            for rank in self._hosts.ranks(settings.num_ranks):
                self._processes.append(start_rank(rank, settings.num_ranks, address, key, self._mark))
            listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
            pipes: dict[int, Connection] = {}
            while len(pipes) < settings.num_ranks:
                try:
                    pipe = listener.accept()
                except (TimeoutError, AuthenticationError, EOFError, ConnectionError):
                    # No client yet, or one without the key.
                    self._require_alive("start")
                    continue
                if self._hosts.num > 1:
                    disable_nagle(pipe)
                pipes[pipe.recv()] = pipe
        for rank, pipe in pipes.items():
            pipe.send(replace(settings, rank=rank, init_method=init_method))
        return [pipes[rank] for rank in range(settings.num_ranks)]

    def _addresses(self) -> tuple[str, str, bytes]:
        """Return the address for commands, the init_method of the ranks' process group, and the key."""
        hosts = self._hosts
        if hosts.num > 1:
            return f"{hosts.address}:{hosts.commands_port}", f"tcp://{hosts.address}:{hosts.port}", hosts.key
        address = f"{self._directory}/ranks"
        assert len(address) < _MAX_SOCKET_PATH, "TMPDIR is too long for a socket"
        return address, f"file://{self._directory}/meeting", secrets.token_bytes(32)  # no TCP port

    def _listener(self, address: str, num_ranks: int, key: bytes) -> Listener:
        if self._hosts.num == 1:
            return Listener(address, family="AF_UNIX", backlog=num_ranks, authkey=key)
        place = (self._hosts.address, self._hosts.commands_port)
        return Listener(place, family="AF_INET", backlog=num_ranks, authkey=key)

    def _answers(self, what: str, seconds: float, *, refused: type[Exception] = WorkerDiedError) -> list[Any]:
        """Read the answers of all ranks, also after an error: an unread answer would be taken for the next call's."""
        deadline, results, failures = time.monotonic() + seconds, [], []
        refusal: tuple[type[Exception], str] | None = None
        for rank, pipe in enumerate(self._pipes):
            while not pipe.poll(min(0.5, max(0.0, deadline - time.monotonic()))):
                self._require_alive(what)
                if time.monotonic() > deadline:
                    state = _state(self._processes[rank].pid) if rank < len(self._processes) else "is on another host"
                    self._lose(
                        f"rank {rank} did not answer `{what}` within {seconds:g} s "
                        f"(cluster.collective_timeout_seconds): it {state}"
                    )
            try:
                kind, result = pipe.recv()
            except (EOFError, OSError):
                self._lose(f"rank {rank} ended in `{what}`")
            results.append(result)
            failures += [(rank, result)] if kind == "error" else []
            if kind == "refused":
                refusal = result
        if refusal is not None and not failures:
            raise refusal[0](f"{refusal[1]} ({self._name})")
        if failures:
            rank, text = failures[0]
            self._lost = f"{self._name}, rank {rank} of {len(self._pipes)} failed in `{what}`:\n{text}"
            raise refused(self._lost if refused is WorkerDiedError else f"SGLang cannot run this: {_reason(text)}")
        return results

    def _require_alive(self, what: str) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                self._lose(f"rank {rank} (process {process.pid}) ended in `{what}` with {process.returncode}")

    def _lose(self, reason: str) -> None:
        self._lost = f"{self._name}: {reason}"
        raise WorkerDiedError(self._lost) from None


def end_ranks(ranks: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """Kills ranks with everything that they have started."""
    for rank in ranks:
        if rank.returncode is None:
            rank.kill()
    for rank in ranks:
        kill_tree(rank, mark)


def start_rank(rank: int, num_ranks: int, address: str, key: bytes, mark: str) -> subprocess.Popen[bytes]:
    """Start a rank on this host, which asks for commands at `address`. mark: for end_ranks.

    Raises: ConfigError where SGLang is not on this host.
    """
    python = sglang_python()
    if not python.is_file():  # the driver's host has it
        raise ConfigError(
            f"{socket.gethostname()} has no {python}: run `make sglang` on every host, or name in {SGLANG_PYTHON} an "
            "interpreter that all have"
        )
    command = [str(python), "-m", "mcore_rl.engines.sglang.rank", address, str(rank)]
    environment = _environment(num_ranks) | {KEY_VARIABLE: key.hex()}
    return subprocess.Popen(command, env=marked(environment, mark), stdout=sys.stderr.fileno())


def _environment(num_ranks: int) -> dict[str, str]:
    """Everything that a rank inherits, and what lets it find this package; not where this environment's own lies."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = inherited | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by scheduler.SPARE_TOKENS, which are never used
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(num_ranks, environment["OMP_NUM_THREADS"]))
    return environment


def _cores(num_ranks: int, threads: str) -> Sequence[str]:
    """A core for each thread of each rank: SGLang wants them named. `threads` as in OMP_NUM_THREADS, which may give a
    number for each level; what OpenMP would not take is one."""
    present = sorted(os.sched_getaffinity(0))
    outermost = threads.split(",", maxsplit=1)[0].strip()
    num_threads = min(max(1, int(outermost)), len(present)) if outermost.isdecimal() else 1
    cores = [str(present[thread % len(present)]) for thread in range(num_ranks * num_threads)]
    return [",".join(cores[first : first + num_threads]) for first in range(0, len(cores), num_threads)]


def _reason(trace: str) -> str:
    """The last line of a traceback; where that is no more than an error's name, with the line of code before it."""
    *before, last = trace.splitlines()
    code = next((line.strip() for line in reversed(before) if line.strip(" ~^")), "")
    return last if ":" in last or not code else f"{last}: {code}"


def _state(pid: int) -> str:
    try:
        return f"is {psutil.Process(pid).status()}"
    except psutil.NoSuchProcess:
        return "is gone"
