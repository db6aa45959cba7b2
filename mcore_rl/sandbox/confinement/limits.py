"""Resource limits of one run, and the command that sets them."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

from mcore_rl.config.sandbox import SandboxConfig

MIB = 1 << 20
SESSION_CPU_FACTOR = 10
"""Factor on cpu_seconds of an episode's interpreter or shell: all its cells share one process."""


@dataclass(frozen=True)
class Limits:
    """Limits in bytes and seconds.

    address_space: whether memory_bytes also limits the address space of each process; some runtimes reserve far more
    than they use.
    """

    seconds: float
    cpu_seconds: int
    memory_bytes: int
    processes: int
    file_bytes: int
    tmp_bytes: int
    output_bytes: int
    open_files: int
    address_space: bool = True

    @classmethod
    def of(cls, config: SandboxConfig) -> Limits:
        return cls(
            seconds=config.seconds,
            cpu_seconds=config.cpu_seconds,
            memory_bytes=config.memory_mib * MIB,
            processes=config.processes,
            file_bytes=config.file_mib * MIB,
            tmp_bytes=config.tmp_mib * MIB,
            output_bytes=config.output_kib << 10,
            open_files=config.open_files,
        )

    def of_session(self) -> Limits:
        return replace(self, cpu_seconds=self.cpu_seconds * SESSION_CPU_FACTOR)

    def within(self, seconds: float | None, *, address_space: bool) -> Limits:
        """Lower the time limit to `seconds` if that is less."""
        seconds = self.seconds if seconds is None else min(self.seconds, seconds)
        return replace(self, seconds=seconds, address_space=address_space)

    def prlimit(self, processes: int) -> list[str]:
        """Return a command prefix that sets the limits and executes the rest.

        It must run inside the namespace, since RLIMIT_NPROC counts processes per user and user namespace. Soft and hard
        limits are equal: otherwise code could ignore the signal of the soft limit and continue.
        """
        limits = {
            "nproc": (processes, resource.RLIMIT_NPROC),
            "cpu": (self.cpu_seconds, resource.RLIMIT_CPU),
            "fsize": (self.file_bytes, resource.RLIMIT_FSIZE),
            "nofile": (self.open_files, resource.RLIMIT_NOFILE),
            "core": (0, resource.RLIMIT_CORE),
        }
        if self.address_space:
            limits["as"] = (self.memory_bytes, resource.RLIMIT_AS)
        options = [f"--{name}={_lowered(value, which)}" for name, (value, which) in limits.items()]
        return ["/usr/bin/prlimit", *options, "--"]


def _lowered(value: int, which: int) -> int:
    """Lower a limit to the hard limit of this process."""
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)
