"""Execution of one command: packs its files, runs it, and collects output and files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.descriptors import in_memory
from mcore_rl.sandbox.confinement.limits import MIB, Limits
from mcore_rl.sandbox.confinement.start import KILLED, Confined, Confinement
from mcore_rl.sandbox.exchange import Budget, Exchange
from mcore_rl.sandbox.interface import Outcome
from mcore_rl.sandbox.parcels import READY, RUN, check_path, pack, unpack


def execute(
    confinement: Confinement,
    command: list[str],
    limits: Limits,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes],
    fetch: tuple[str, ...] = (),
) -> Outcome:
    """Run a command in a new sandbox. Raises: SandboxError if it did not start."""
    names = [check_path(name) for name in fetch]
    parcel = in_memory("files", pack(files))
    reader, writer = os.pipe()
    inside = ["/bin/bash", "-c", RUN, "sandbox", str(parcel), str(writer), str(len(names)), *names, *command]
    try:
        try:
            confined = Confined(confinement, inside, limits, inherited=(parcel, writer))
        finally:
            os.close(parcel)
            os.close(writer)
        return _follow(confined, limits, stdin, reader, fetch)
    finally:
        os.close(reader)


def _follow(confined: Confined, limits: Limits, stdin: bytes, parcel: int, fetch: tuple[str, ...]) -> Outcome:
    started = time.monotonic()
    process, exchange, output = confined.process, Exchange(confined), Budget(limits.output_bytes)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        exchange.send(process.stdin, stdin, close=True)
        stdout = exchange.receive(process.stdout.fileno(), output)
        stderr = exchange.receive(process.stderr.fileno(), output)
        packed = exchange.receive(parcel, Budget(limits.tmp_bytes + MIB))
        why = exchange.until(lambda: False, limits.seconds)
        if why == "exit" and not confined.wait(max(0.0, limits.seconds - (time.monotonic() - started))):
            why = "timeout"
        if confined.memory_exceeded():
            why = "memory"
    finally:
        exchange.close()
        code = confined.end()
    message = stderr.decode("utf-8", "replace")
    if why == "exit" and not packed.startswith(READY):
        raise SandboxError(f"the sandbox did not start: {message.strip() or f'it ended with code {code}'}")
    return Outcome(
        why=why,
        return_code=code if why == "exit" else KILLED,
        stdout=stdout.decode("utf-8", "replace"),
        stderr=message,
        seconds=time.monotonic() - started,
        files=unpack(bytes(packed[len(READY) :]), fetch) if why == "exit" else {},
    )
