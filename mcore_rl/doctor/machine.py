"""Hardware of this machine that determines the size of a run."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.doctor.checks import GIB, memory_gib, usable_cores
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.installed import has_module


@dataclass(frozen=True)
class Machine:
    """GPUs, with the memory of the smallest one, cores and memory. `host_memory_gib`: None if unknown."""

    num_gpus: int
    gpu_name: str = ""
    gpu_memory_gib: int = 0
    cores: int | None = None
    host_memory_gib: int | None = None

    def describe(self) -> str:
        """Return `8 GPUs (NVIDIA H100) of 79 GiB, 128 cores, 1800 GiB of memory`."""
        name = f" ({self.gpu_name})" if self.gpu_name else ""
        plural = "" if self.num_gpus == 1 else "s"
        gpus = f"{self.num_gpus} GPU{plural}{name} of {self.gpu_memory_gib} GiB" if self.num_gpus else "no GPU"
        cores = "" if self.cores is None else f", {self.cores} cores"
        memory = "" if self.host_memory_gib is None else f", {self.host_memory_gib} GiB of memory"
        return f"{gpus}{cores}{memory}"


def this_machine() -> Machine:
    """Inspect this machine. Imports torch, which finds the GPUs.

    Raises: ConfigError if torch is installed but cannot be imported.
    """
    cores, memory = usable_cores(), int(memory_gib()[0])
    if has_module("torch"):
        try:
            import torch
        except (ImportError, OSError) as error:  # OSError: a library that it links to is missing
            raise ConfigError(f"torch cannot be imported ({error}); run `mcore-rl doctor`") from None
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        if devices:
            names = ", ".join(sorted({device.name for device in devices}))
            smallest = min(device.total_memory for device in devices)
            return Machine(len(devices), names, int(smallest / GIB), cores, memory)
    return Machine(0, cores=cores, host_memory_gib=memory)
