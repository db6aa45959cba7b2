"""Resource limits of one run, and the command that sets them."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from mcore_rl.config.sandbox import SandboxConfig

MIB = 1 << 20
SESSION_CPU_FACTOR = 10
"""Factor on cpu_seconds of an episode's interpreter or shell: all its cells share one process."""


@dataclass
class RunLimits(SandboxConfig):
    """Limits of one run: the configured ones, possibly lowered.

    address_space: whether memory_mib also limits the address space of each process; some runtimes reserve far more
    than they use.
    """

    address_space: bool = True

    def prlimit(self, processes: int) -> list[str]:
        """Return a command prefix that sets the limits and executes the rest.

        It must run inside the namespace, since RLIMIT_NPROC counts processes per user and user namespace. Soft and hard
        limits are equal: otherwise code could ignore the signal of the soft limit and continue.
        """
        limits = {
            "nproc": (processes, resource.RLIMIT_NPROC),
            "cpu": (self.cpu_seconds, resource.RLIMIT_CPU),
            "fsize": (self.file_mib * MIB, resource.RLIMIT_FSIZE),
            "nofile": (self.open_files, resource.RLIMIT_NOFILE),
            # A core dump could be as large as the memory limit.
            "core": (0, resource.RLIMIT_CORE),
        }
        if self.address_space:
            limits["as"] = (self.memory_mib * MIB, resource.RLIMIT_AS)
        options = [f"--{name}={_lowered(value, which)}" for name, (value, which) in limits.items()]
        return ["/usr/bin/prlimit", *options, "--"]


def _lowered(value: int, which: int) -> int:
    """Lower a limit to the hard limit of this process."""
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)
