"""Two simulated hosts (network namespaces) with a Ray cluster, and runs on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "two_hosts.sh"
ADDRESS = "10.213.7.1:6379"


@dataclass(frozen=True)
class TwoHosts:
    """Two simulated hosts, A and B. `name` distinguishes them from other simulated hosts on this machine."""

    name: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TWO_HOSTS": self.name}

    def call(self, *words: str) -> str:
        """Run scripts/two_hosts.sh with the given arguments; return its output."""
        done = subprocess.run(
            [str(SCRIPT), *words], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def command(self, host: str, *words: str) -> list[str]:
        """Return the command line that runs a command on a host."""
        return [str(SCRIPT), host, *words]

    def shared_memory(self, host: str) -> set[str]:
        """Return the names in the host's /dev/shm, except Ray's."""
        names = self.call(host, "ls", "/dev/shm").split()
        return {name for name in names if not name.startswith(("plasma", "ray", "sem."))}

    def processes(self, host: str, *titles: str) -> list[psutil.Process]:
        """Return the host's processes whose title contains any of `titles`."""
        done = subprocess.run(
            ["ip", "netns", "pids", f"{self.name}_{host}"], capture_output=True, text=True, check=True
        )
        found = []
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(title in " ".join(process.cmdline()) for title in titles):
                    found.append(process)
        return found

    def signal(self, host: str, title: str, number: signal.Signals) -> None:
        process, *_ = self.processes(host, title)
        process.send_signal(number)

    def wait_until_none(self, *titles: str, seconds: float = 30) -> None:
        """Wait until no process on either host has any of `titles` in its title."""
        deadline = time.monotonic() + seconds
        while left := [process for host in "AB" for process in self.processes(host, *titles)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


@contextmanager
def two_hosts(cpus: int = 6) -> Iterator[TwoHosts]:
    """Start two hosts. Skips the test if this machine does not allow network namespaces."""
    if os.geteuid() != 0:
        pytest.skip("simulated hosts need root: network namespaces")
    hosts = TwoHosts(f"t{secrets.token_hex(3)}")
    done = subprocess.run(
        [str(SCRIPT), "up"], env=hosts.environment, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        pytest.skip(f"simulated hosts cannot be created here: {done.stderr.strip()}")
    try:
        hosts.call("ray", str(cpus))
        yield hosts
    finally:
        hosts.call("down")
