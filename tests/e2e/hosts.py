"""Two pretended hosts with a Ray cluster over them, and runs on it."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "two_hosts.sh"
ADDRESS = "10.213.7.1:6379"


@dataclass(frozen=True)
class TwoHosts:
    """`name` keeps them apart from others on this machine."""

    name: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TWO_HOSTS": self.name}

    def call(self, *words: str) -> str:
        """Runs scripts/two_hosts.sh with these words; returns what it prints."""
        done = subprocess.run(
            [str(SCRIPT), *words], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def command(self, host: str, *words: str) -> list[str]:
        """What runs a command on a host."""
        return [str(SCRIPT), host, *words]

    def shared_memory(self, host: str) -> set[str]:
        """Names in the host's /dev/shm, but Ray's."""
        names = self.call(host, "ls", "/dev/shm").split()
        return {name for name in names if not name.startswith(("plasma", "ray", "sem."))}


@contextmanager
def two_hosts(cpus: int = 6) -> Iterator[TwoHosts]:
    """Skips the test where this machine lets nobody make namespaces."""
    if os.geteuid() != 0:
        pytest.skip("two pretended hosts need root: network namespaces")
    hosts = TwoHosts(f"t{secrets.token_hex(3)}")
    done = subprocess.run(
        [str(SCRIPT), "up"], env=hosts.environment, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        pytest.skip(f"two pretended hosts cannot be made here: {done.stderr.strip()}")
    try:
        hosts.call("ray", str(cpus))
        yield hosts
    finally:
        hosts.call("down")
