"""Command `mcore-rl harness-worker`: a worker in a container or on another machine."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import ConfigError, WorkerDiedError
from mcore_rl.rollout.gateway.harness.function import FunctionHarness
from mcore_rl.rollout.gateway.harness.interface import Harness
from mcore_rl.rollout.gateway.harness.process import TOKEN, ProcessHarness
from mcore_rl.rollout.gateway.harness.worker import HarnessWorker
from mcore_rl.rollout.gateway.wire import FILE


@dataclass(frozen=True)
class WorkerOptions:
    """gateway: run directory or URL. Exactly one of function and command is set."""

    gateway: str
    function: str | None
    command: str | None
    concurrent: int


def work(options: WorkerOptions) -> int:
    """Work for all gateways of a run until they end. Returns the exit code.

    Raises: ConfigError if there is no gateway, no token, or no such program.
    """
    harness = _harness(options)
    workers = [HarnessWorker(harness, url, token, options.concurrent) for url, token in _gateways(options.gateway)]

    async def run() -> list[BaseException | None]:
        return await asyncio.gather(*(worker.run() for worker in workers), return_exceptions=True)

    errors = [error for error in asyncio.run(run()) if error is not None]
    for error in errors:
        if not isinstance(error, WorkerDiedError):
            raise error
    ended, causes = sum(worker.num_ended for worker in workers), "; ".join(map(str, errors))
    # A gateway ends with its run. Before the first session, its address is probably wrong.
    if not ended:
        raise ConfigError(causes)
    print(f"{ended} sessions done; {causes}", flush=True)
    return 0


def _harness(options: WorkerOptions) -> Harness:
    if (options.function is None) == (options.command is None):
        raise ConfigError("name the program of each session with either --function or --command")
    if options.function is not None:
        return FunctionHarness(options.function, {})
    assert options.command is not None
    return ProcessHarness(options.command)


def _gateways(given: str) -> list[tuple[str, str]]:
    """Return URL and token of each gateway."""
    if given.startswith(("http://", "https://")):
        token = os.environ.get(TOKEN)
        if not token:
            raise ConfigError(
                f"{given}: set the environment variable {TOKEN} to `token` of {FILE} in the run directory"
            )
        return [(given.rstrip("/"), token)]
    file = Path(given) / FILE
    if not file.exists():
        raise ConfigError(
            f"{file} does not exist: no run with rollout.episode=gateway is in progress there; start the run first, or "
            "give the gateway's URL"
        )
    return [(entry["url"], entry["token"]) for entry in json.loads(file.read_text(encoding="utf-8"))]
