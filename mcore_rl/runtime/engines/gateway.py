"""The gateways of a run, one per host with engines (rollout.episode=gateway)."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import ray

from mcore_rl.config.episodes import SERVING
from mcore_rl.config.rules.rollout import episode_of
from mcore_rl.config.schema import Config
from mcore_rl.errors import WorkerDiedError
from mcore_rl.processes.child import start_module
from mcore_rl.processes.exits import exit_text
from mcore_rl.processes.pool import Worker, results
from mcore_rl.rollout.gateway.harness.program import HarnessSettings
from mcore_rl.rollout.gateway.wire import FILE, GatewayAddress
from mcore_rl.runtime.calls import ProcessHandle, remote_method
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import RunProcess
from mcore_rl.runtime.roles.origins import marks_errors

HostMemory = tuple[str, int]
"""Host.memory."""
ALL_ADDRESSES = ("0.0.0.0", "::")
LOOK_SECONDS = 0.5
"""Interval of checks that the server and the worker run."""


@marks_errors
class GatewayProcess(RunProcess):
    """The gateway of a host, with the worker that runs the programs of rollout.harness."""

    def setup(self, config: Config, concurrent: int) -> GatewayAddress:
        """Start to listen. `concurrent`: maximum number of programs at a time."""
        # The driver of every run imports this class, and the server's libraries need more than a second.
        from mcore_rl.rollout.gateway.server import GatewayServer

        with self.spans.span("setup"):
            rollout, host = config.rollout, config.rollout.gateway_address
            advertised = ray.util.get_node_ip_address() if host in ALL_ADDRESSES else host
            model = Path(config.model.hf_path).name
            serves = episode_of(rollout) == SERVING
            room = rollout.max_concurrent_requests
            self._server = GatewayServer(model, host, rollout.gateway_port, advertised, serves=serves, room=room)
            self._worker: Worker | None = None
            if rollout.harness is not None:
                settings = HarnessSettings(rollout, config.sandbox, self._server.address, concurrent)
                self._worker = _started(settings)
            return self._server.address

    @remote_method(concurrency_group="serve")
    def serve(self) -> None:
        """Return never. The driver calls it once, after `setup`.

        Raises: WorkerDiedError when the server or the worker has ended.
        """
        pause = threading.Event()
        while not pause.wait(LOOK_SECONDS):
            if self._server.failure is not None:
                raise WorkerDiedError(f"the gateway has ended: {self._server.failure!r}")
            child = None if self._worker is None else self._worker.child
            if child is not None and child.exit_code is not None:
                raise WorkerDiedError(f"the worker of rollout.harness has ended with {exit_text(child.exit_code)}")


GatewayActor = ray.remote(concurrency_groups={"watch": 2, "serve": 1}, max_restarts=0)(GatewayProcess)


def _started(settings: HarnessSettings) -> Worker:
    """Start the worker of rollout.harness. Raises: ConfigError if it cannot load the program."""
    child, socket = start_module("mcore_rl.rollout.gateway.harness.program")
    worker = Worker("the worker of rollout.harness", Connection(socket.detach()), child)
    worker.send(settings)
    results([worker], "load the program")
    return worker


@contextlib.contextmanager
def gateways_started(
    processes: Sequence[ProcessHandle[GatewayProcess]], config: Config, concurrent: int, watch: Watch
) -> Iterator[Mapping[HostMemory, GatewayAddress]]:
    """Set up the gateways and yield their addresses by the memory of their host (Host.memory). A file in the run
    directory lists them during the block.

    concurrent: maximum number of programs of a host at a time.
    """
    addresses = watch.get([process.call(GatewayProcess.setup, config, concurrent) for process in processes])
    places = watch.get([process.call(RunProcess.where) for process in processes])
    for process in processes:
        watch.add_call(process, process.call(GatewayProcess.serve))
    by_host = {host.memory: address for (host, _), address in zip(places, addresses, strict=True)}
    file = Path(config.run.dir) / FILE
    try:
        if addresses:
            _write(file, addresses)
        yield by_host
    finally:
        file.unlink(missing_ok=True)


def _write(file: Path, addresses: Sequence[GatewayAddress]) -> None:
    # Only for this user: who has the token can take sessions and reward them.
    partial = file.with_name(f"{file.name}.partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        json.dump([asdict(address) for address in addresses], stream, indent=2)
    os.replace(partial, file)
