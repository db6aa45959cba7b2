"""Command without a sandbox as the program of a session, for workers in containers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.rollout.gateway.exchange import OpenedSession
from mcore_rl.rollout.gateway.harness.interface import ROW, Finished, variables

TOKEN = "MCORE_RL_GATEWAY_TOKEN"
"""Environment variable with the token of a gateway that is given by its URL. Programs do not get it: with it, they
could take, reward and end every session."""
DRAIN_SECONDS = 5.0
"""Time to read what is left of the output when the command has ended."""
MAX_OUTPUT_BYTES = 1 << 20
"""Limit of the output that graders receive, of each stream; the rest is read and dropped."""


class ProcessHarness:
    """Runs a command in a new directory with row.json. It has the permissions of the worker: run the worker of an
    untrusted program in a container.

    Raises: ConfigError for a command that is no valid shell word list.
    """

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--command {command} is not a valid command: {error}") from None

    async def run(self, session: OpenedSession, base_url: str) -> Finished:
        """Same as Harness.run."""
        with tempfile.TemporaryDirectory(prefix="mcore_rl_harness_", ignore_cleanup_errors=True) as directory:
            Path(directory, ROW).write_text(json.dumps(session.row), encoding="utf-8")
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._words,
                    cwd=directory,
                    env=_without_token(os.environ) | variables(base_url, session.key),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                return Finished(error=f"the command did not start: {error}")
            assert process.stdout is not None
            assert process.stderr is not None
            kept = bytearray(), bytearray()
            readers = [
                asyncio.create_task(_read(stream, each))
                for stream, each in zip((process.stdout, process.stderr), kept, strict=True)
            ]
            try:
                try:
                    await _ended(process.pid)
                finally:
                    # Processes that the command has left behind would keep its output open.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait(readers, timeout=DRAIN_SECONDS)
                while (code := process.returncode) is None:  # set by asyncio's own watcher
                    await asyncio.sleep(0.01)
            finally:
                for reader in readers:
                    reader.cancel()
        stdout, stderr = (each.decode("utf-8", "replace") for each in kept)
        code = code if code >= 0 else 128 - code
        return Finished(extra={"exit_code": code, "stdout": stdout, "stderr": stderr})


async def _ended(pid: int) -> None:
    """Wait for the end of a child process. In Python 3.11 Process.wait() also waits until its pipes are closed."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended and asyncio has collected its exit code
        return
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _without_token(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != TOKEN}


async def _read(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Read a stream to its end; add its beginning to `kept`."""
    while data := await stream.read(1 << 16):
        kept += data[: MAX_OUTPUT_BYTES - len(kept)]
