"""Processes of an SGLang engine's ranks: start, calls and termination, from the project's environment.

Calls go over a Unix socket in a directory of mode 0700, or over TCP if the engine spans hosts. Both require a key,
because messages are pickled: whoever connects can run code. The key is passed in the environment, never on a command
line.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

from mcore_rl.config.rules.engine_support import SGLANG_PYTHON, sglang_python
from mcore_rl.engines.settings import ONE_HOST, EngineHosts
from mcore_rl.engines.sglang.environment import rank_environment
from mcore_rl.engines.sglang.rank import KEY_VARIABLE, MEASURE, START
from mcore_rl.engines.sglang.settings import GpuMemory, RankSettings, disable_nagle
from mcore_rl.errors import ConfigError, McoreRLError, WorkerDiedError
from mcore_rl.processes.child import Child, kill_all
from mcore_rl.processes.exits import exit_text
from mcore_rl.processes.pool import CallFailedError, LostWorkerError, Worker, results

MemoryArguments = Callable[[Sequence[GpuMemory]], dict[str, object]]
# Linux limits the path of a Unix socket to 107 bytes (sun_path).
_MAX_SOCKET_PATH = 100


class RankProcesses:
    """All ranks of one engine.

    settings: settings that all ranks share; `rank` and `init_method` are replaced for each rank.
    name: the engine's name, for messages.
    hosts: hosts of the engine. Only the ranks of the first host are started here; engine.follow starts the others.
    memory_arguments: function that returns further server arguments for the memory of the ranks' GPUs. Not called on
        CPU.

    The start has no deadline of its own: the caller sets one.
    Raises: ConfigError if SGLang rejects the settings; WorkerDiedError if a rank ends during the start.
    """

    def __init__(
        self,
        settings: RankSettings,
        name: str,
        timeout_seconds: float,
        hosts: EngineHosts = ONE_HOST,
        *,
        memory_arguments: MemoryArguments = lambda memory: {},
    ) -> None:
        self._hosts = hosts
        self._name, self.timeout_seconds = name, timeout_seconds
        self._lost: str | None = None
        self._directory = tempfile.mkdtemp(prefix="mcore_rl_sglang_")  # mode 0700
        self._processes: list[Child] = []
        try:
            address, init_method, key = self._addresses()
            self._ranks = self._connected(settings, address, key)
            by_rank = [replace(settings, rank=rank, init_method=init_method) for rank in range(settings.num_ranks)]
            if settings.device == "cuda":
                arguments = settings.server_arguments | memory_arguments(self._call_each(MEASURE, by_rank))
                by_rank = [replace(each, server_arguments=arguments) for each in by_rank]
            vocab_size = self._call_each(START, by_rank)[0]
            assert isinstance(vocab_size, int)
            self.vocab_size = vocab_size
        except CallFailedError as error:
            self.end()
            raise ConfigError(f"SGLang cannot run this: {_reason(error.traceback)}") from error
        except BaseException:
            self.end()
            raise
        shutil.rmtree(self._directory)  # all ranks are connected

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of SteppedScheduler on all ranks. Returns the results by rank.

        Raises: a rank's McoreRLError; WorkerDiedError if a rank fails, ends, or does not answer in time, and in every
        later call.
        """
        return self.call_each(method, [arguments] * len(self._ranks))

    def call_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """Implement `call` with the arguments of each rank."""
        if self._lost is not None:
            raise WorkerDiedError(self._lost)
        for rank, own in zip(self._ranks, arguments, strict=True):
            rank.send((method, own))
        try:
            return results(self._ranks, method, self.timeout_seconds, "cluster.collective_timeout_seconds")
        except LostWorkerError as error:
            self._lost = str(error)
            raise WorkerDiedError(self._lost) from None
        except McoreRLError as error:
            raise type(error)(f"{error} ({self._name})") from None

    def end(self) -> None:
        kill_all(self._processes)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _call_each(self, method: str, settings: Sequence[RankSettings]) -> list[Any]:
        """Call a method of Rank on all ranks, each with its settings. Returns the results by rank."""
        for worker, own in zip(self._ranks, settings, strict=True):
            worker.send((method, (own,)))
        return results(self._ranks, method)

    def _connected(self, settings: RankSettings, address: str, key: bytes) -> list[Worker]:
        """Start the ranks of this host and accept the connections of all ranks."""
        num_ranks = settings.num_ranks
        connections: dict[int, Connection] = {}
        place = address if self._hosts.num == 1 else (self._hosts.address, self._hosts.commands_port)
        with Listener(place, backlog=num_ranks, authkey=key) as listener:
            for rank in self._hosts.ranks(num_ranks):
                self._processes.append(start_rank(rank, num_ranks, address, key, settings.device))
            # A rank that ends during the start never connects: wake up to check the processes.
            listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
            while len(connections) < num_ranks:
                try:
                    connection = listener.accept()
                except (TimeoutError, AuthenticationError, EOFError, ConnectionError):
                    # No client yet, or one without the key.
                    self._require_running()
                    continue
                if self._hosts.num > 1:
                    disable_nagle(connection)
                connections[connection.recv()] = connection
        local = dict(zip(self._hosts.ranks(num_ranks), self._processes, strict=True))
        return [Worker(f"{self._name}: rank {rank}", connections[rank], local.get(rank)) for rank in range(num_ranks)]

    def _require_running(self) -> None:
        for process in self._processes:
            if process.exit_code is not None:
                died = f"process {process.pid} ended in `{START}` with {exit_text(process.exit_code)}"
                raise WorkerDiedError(f"{self._name}: {died}")

    def _addresses(self) -> tuple[str, str, bytes]:
        """Return the address for commands, the init_method of the ranks' process group, and the key."""
        hosts = self._hosts
        if hosts.num > 1:
            return f"{hosts.address}:{hosts.commands_port}", f"tcp://{hosts.address}:{hosts.port}", hosts.key
        address = f"{self._directory}/ranks"
        assert len(address) < _MAX_SOCKET_PATH, "TMPDIR is too long for a socket"
        return address, f"file://{self._directory}/meeting", secrets.token_bytes(32)  # no TCP port


def start_rank(rank: int, num_ranks: int, address: str, key: bytes, device: str) -> Child:
    """Start a rank on this host, which connects to `address`. `device`: cpu or cuda.

    Raises: ConfigError if SGLang is not installed on this host, or not for this device.
    """
    python = sglang_python()
    if not python.is_file():  # preparation has checked the driver's host only
        raise ConfigError(
            f"{socket.gethostname()} has no {python}: run `make sglang` on every host, or name in {SGLANG_PYTHON} an "
            "interpreter that all have"
        )
    command = [str(python), "-m", "mcore_rl.engines.sglang.rank", address, str(rank), str(os.getpid())]
    environment = rank_environment(device, num_ranks, key) | {KEY_VARIABLE: key.hex()}
    return Child(command, environment, stdout=sys.stderr.fileno())


def _reason(trace: str) -> str:
    """Return the last line of a traceback; with the line of code before it if the last line is only an error's name."""
    *before, last = trace.splitlines()
    code = next((line.strip() for line in reversed(before) if line.strip(" ~^")), "")
    return last if ":" in last or not code else f"{last}: {code}"
