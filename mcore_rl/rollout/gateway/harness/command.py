"""Command in the sandbox as the program of a session."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from mcore_rl.config.sandbox import BUBBLEWRAP, SandboxConfig
from mcore_rl.errors import ConfigError, SandboxError
from mcore_rl.rollout.gateway.exchange import OpenedSession
from mcore_rl.rollout.gateway.harness.forwarder import ORDERS, PORT
from mcore_rl.rollout.gateway.harness.interface import ROW, Finished, variables
from mcore_rl.sandbox.check import check_sandbox
from mcore_rl.sandbox.confinement.commands import SESSION_CPU_FACTOR, RunLimits
from mcore_rl.sandbox.interface import Outcome
from mcore_rl.sandbox.interpreter import PYTHON
from mcore_rl.sandbox.local import LocalSandbox, resolve_command

FORWARDER = Path(__file__).with_name("forwarder.py").read_text()
INSIDE = f"http://127.0.0.1:{PORT}"
NO_LIMIT = 1e9
"""Seconds without rollout.max_episode_seconds."""


class CommandHarness:
    """Runs a command in a sandbox of its own, with the row's fields in row.json, at most `concurrent` at a time.

    clients: path of the gateway's unix socket for clients. seconds: time limit; the sandbox section has the others.
    """

    def __init__(
        self,
        command: str,
        files: Sequence[str],
        sandbox: SandboxConfig,
        clients: str,
        seconds: float | None,
        concurrent: int,
    ) -> None:
        # A directory of read_only is visible under its own path. Connecting to a socket needs no writable mount.
        visible = [*sandbox.read_only, str(Path(clients).parent)]
        config = replace(sandbox, read_only=visible, max_running=concurrent)
        self._command, self._files, self._clients = shlex.split(command), tuple(files), clients
        self._sandbox, self._config = LocalSandbox(config), config
        cpu_seconds = sandbox.cpu_seconds * SESSION_CPU_FACTOR
        limits = vars(config) | {"cpu_seconds": cpu_seconds, "seconds": seconds or NO_LIMIT}
        self._limits = RunLimits(**limits)
        self._threads = ThreadPoolExecutor(concurrent, thread_name_prefix="harness")

    async def run(self, session: OpenedSession, base_url: str) -> Finished:
        """Same as Harness.run. The exit code is not an error: graders see it."""
        stopped = threading.Event()
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._run, session, stopped)
            outcome = await asyncio.shield(running)
        except asyncio.CancelledError:
            stopped.set()
            raise
        except SandboxError as error:
            return Finished(error=f"rollout.harness could not be started: {error}")
        files = {name: content.decode("utf-8", "replace") for name, content in outcome.files.items()}
        shown = {"exit_code": outcome.return_code, "why": outcome.why, "seconds": outcome.seconds}
        return Finished(extra={**shown, "stdout": outcome.stdout, "stderr": outcome.stderr, "files": files})

    def _run(self, session: OpenedSession, stopped: threading.Event) -> Outcome:
        environment = variables(f"{INSIDE}/sessions/{session.id}", session.key)
        command = resolve_command(tuple(self._command), self._config)
        orders = {"socket": self._clients, "command": command, "environment": environment}
        files = {ROW: json.dumps(session.row).encode(), ORDERS: json.dumps(orders).encode()}
        start = resolve_command((PYTHON, "-I", "-c", FORWARDER), self._config)
        return self._sandbox.execute(start, self._limits, files=files, fetch=self._files, stopped=stopped.is_set)


def check_command(command: str, sandbox: SandboxConfig) -> None:
    """Raise ConfigError for a command that cannot run in the sandbox."""
    if sandbox.kind != BUBBLEWRAP:
        raise ConfigError(
            f"rollout.harness={command} needs sandbox.kind={BUBBLEWRAP}: with {sandbox.kind}, a command could reach "
            "other servers than the gateway; set sandbox.kind, or name a function"
        )
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"rollout.harness={command} is not a valid command: {error}") from None
    check_sandbox(sandbox)
    program = resolve_command(tuple(words), sandbox)[0]
    if not os.access(program, os.X_OK):
        raise ConfigError(
            f"rollout.harness={command}: there is no program {program} that the sandbox sees; give an absolute path "
            "below /usr or a directory of sandbox.read_only, or use {python} for sandbox.python"
        )
