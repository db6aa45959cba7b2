"""Command without a sandbox as the program of a session, for workers in containers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.rollout.gateway.exchange import OpenedSession
from mcore_rl.rollout.gateway.harness.interface import ROW, Finished, variables

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
                    env={**os.environ, **variables(base_url, session.key)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                return Finished(error=f"the command did not start: {error}")
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                stdout, stderr, code = await asyncio.gather(
                    _text(process.stdout), _text(process.stderr), process.wait()
                )
            finally:
                with contextlib.suppress(ProcessLookupError):  # all processes of the group have ended
                    os.killpg(process.pid, signal.SIGKILL)
        code = code if code >= 0 else 128 - code
        return Finished(extra={"exit_code": code, "stdout": stdout, "stderr": stderr})


async def _text(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end; return its beginning."""
    kept = bytearray()
    while data := await stream.read(1 << 16):
        kept += data[: MAX_OUTPUT_BYTES - len(kept)]
    return kept.decode("utf-8", "replace")
