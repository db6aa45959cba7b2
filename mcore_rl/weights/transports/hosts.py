"""Which processes can hand each other weights through shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import ConfigError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Host:
    """`memory` is the same for two processes exactly when they see one /dev/shm: two Ray nodes of one machine do, two
    containers on it may not."""

    name: str
    memory: tuple[str, int]


def this_host() -> Host:
    """The host of the calling process."""
    return Host(socket.gethostname(), (BOOT_ID.read_text().strip(), os.stat(SHARED_MEMORY).st_dev))


def check_one_host(processes: Sequence[tuple[str, Host]]) -> None:
    """Raises ConfigError, saying which process is where, unless all of them share their memory."""
    by_memory: dict[tuple[str, int], list[tuple[str, Host]]] = {}
    for name, host in processes:
        by_memory.setdefault(host.memory, []).append((name, host))
    if len(by_memory) < 2:
        return
    places = [f"{members[0][1].name} ({_briefly([name for name, _ in members])})" for members in by_memory.values()]
    raise ConfigError(
        f"cluster.nodes: engines receive weights through shared memory, but the processes are on {len(places)} hosts "
        f"that share none: {_briefly(places)}; there is no transport between hosts yet, so set "
        "cluster.nodes=1, or train without engines (algorithm.policy_loss.name=sft)"
    )


def _briefly(names: list[str], shown: int = 4) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
