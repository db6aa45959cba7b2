"""Sandbox without namespaces: Landlock, a seccomp filter, and resource limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.sandbox.confinement.bubblewrap import SEARCHED, environment
from mcore_rl.sandbox.confinement.limits import Limits
from mcore_rl.sandbox.confinement.seccomp import filter_program
from mcore_rl.sandbox.confinement.users import num_threads_of, uid_range

LAUNCHER = Path(__file__).with_name("landlock_launcher.py")
_READABLE = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ssl/openssl.cnf", *SEARCHED)
_WRITABLE = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_STOP_SECONDS = 10.0
"""Time limit until the launcher has killed everything inside; then the launcher is killed."""


class Landlock:
    """Confinement of sandbox.kind=landlock: a launcher confines the command and kills processes that remain.

    docs/sandbox.md lists what Landlock does not contain.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._filter = filter_program(sockets=False)

    def command(self, inside: list[str], limits: Limits) -> tuple[list[str], list[int]]:
        """Return the command line and no descriptors."""
        processes = limits.processes
        if os.geteuid() != 0:  # RLIMIT_NPROC counts all processes of this user
            processes += num_threads_of(os.geteuid())
        orders = {
            "readable": [*_READABLE, *map(os.path.abspath, self._config.read_only)],
            "writable": list(_WRITABLE),
            "filter": self._filter.hex(),
            "environment": environment(""),
            "users": list(uid_range()),
            "command": [*limits.prlimit(processes), *inside],
        }
        return [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(orders)], []

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Terminate the launcher, which then kills everything inside. Code inside cannot signal the launcher."""
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
