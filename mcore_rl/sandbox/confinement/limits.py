"""What one run may take, and the command that sets what the kernel counts."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

from mcore_rl.config.sandbox import SandboxConfig

MIB = 1 << 20
SESSION_CPU_FACTOR = 10
"""Of what lives for an episode: its processor time is that of all of its cells together."""


@dataclass(frozen=True)
class Limits:
    """The configuration's, in bytes and seconds. address_space: whether memory_bytes is also that of each process;
    some runtimes reserve far more than they use."""

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

    def within(self, seconds: float | None, memory_mib: int | None, *, address_space: bool = True) -> Limits:
        """These, or less where it is asked for."""
        memory = self.memory_bytes if memory_mib is None else min(self.memory_bytes, memory_mib * MIB)
        return replace(
            self,
            seconds=self.seconds if seconds is None else min(self.seconds, seconds),
            memory_bytes=memory,
            address_space=address_space,
        )

    def prlimit(self, processes: int) -> list[str]:
        """A command that sets the limits and becomes the one after it. It has to run inside: outside, processes would
        be those of the user everywhere. Soft limits are hard ones, so that ignoring a signal gains nothing."""
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
    """No more than this process may set."""
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)
