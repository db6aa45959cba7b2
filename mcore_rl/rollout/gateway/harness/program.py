"""Child process of a gateway that runs rollout.harness (`python -m mcore_rl.rollout.gateway.harness.program`)."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mcore_rl.config.episodes import harness_is_function
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.processes import served
from mcore_rl.rollout.gateway.harness.interface import Harness
from mcore_rl.rollout.gateway.harness.worker import HarnessWorker
from mcore_rl.rollout.gateway.wire import GatewayAddress


@dataclass(frozen=True)
class HarnessSettings:
    """Settings from the parent process. concurrent: maximum number of programs at a time."""

    rollout: RolloutConfig
    sandbox: SandboxConfig
    address: GatewayAddress
    concurrent: int


def harness_of(settings: HarnessSettings) -> Harness:
    """Build the program of rollout.harness.

    Raises: ConfigError naming the key and the cause.
    """
    rollout = settings.rollout
    assert rollout.harness is not None, "programs take sessions by themselves"
    if harness_is_function(rollout.harness):
        from mcore_rl.rollout.gateway.harness.function import FunctionHarness

        return FunctionHarness(rollout.harness, rollout.episode_kwargs)
    from mcore_rl.rollout.gateway.harness.command import CommandHarness

    return CommandHarness(
        rollout.harness,
        rollout.harness_files,
        settings.sandbox,
        settings.address.clients,
        rollout.max_episode_seconds,
        settings.concurrent,
    )


def serve(connection: Connection) -> None:
    """Build the program, answer "ready", and take sessions until the gateway ends."""
    settings: HarnessSettings = connection.recv()
    made: list[Harness] = []
    served.answer(connection, lambda: made.append(harness_of(settings)))
    if made:
        asyncio.run(HarnessWorker(made[0], settings.address.url, settings.address.token, settings.concurrent).run())


if __name__ == "__main__":
    served.run(serve)
    os._exit(0)  # an ordinary exit would wait for threads of functions that do not return
