"""Environment variables of SGLang's ranks. The linker, CUDA and NCCL read them when a rank starts."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.rules.engine_support import SGLANG_PYTHON, sglang_python
from mcore_rl.errors import ConfigError

ROOT = Path(__file__).parents[3]

CUDA_DEFAULTS = {
    "CUTE_DSL_LOG_LEVEL": "30",
    "CUTE_DSL_LOG_TO_CONSOLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TRTLLM_ENABLE_PDL": "1",
}
"""Variables of SGLang 0.5.23's own start (entrypoints/engine.py, _set_envs_and_config) that the user may set."""
CUDA_VARIABLES = {
    # Trainer ranks need 1, which a rank would inherit.
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    # The GPUs of an engine may have different amounts of free memory: pipeline stages of trainer ranks differ.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_NOT_PAUSABLE = "expandable_segments"
"""Option of PyTorch's allocator that torch_memory_saver rejects."""


@dataclass(frozen=True)
class MemorySaver:
    """Library of torch_memory_saver, which replaces cudaMalloc and so must be loaded before CUDA.

    cuda_runtime: folder of the CUDA runtime that the library needs; None if the system has it. Without it the linker
        ends the process: torch, which knows the folder, is not loaded yet.
    """

    library: Path
    cuda_runtime: Path | None = None


def rank_environment(device: str, num_ranks: int, key: bytes) -> dict[str, str]:
    """Return the environment of a rank on `device` (cpu, cuda): this process's, with only this project on the import
    path.

    Other directories of this process's PYTHONPATH would hide packages of SGLang's environment.
    key: authentication key, which all ranks of an engine share, also those on other hosts.
    Raises: ConfigError if SGLang's environment cannot run on a GPU.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = inherited | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by arguments.SPARE_TOKENS, which are never used
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("OMP_NUM_THREADS", "1")
    if device == "cpu":
        return _on_cpu(environment, num_ranks)
    # SGLang's ranks meet at a name with this identifier. A digest, because it appears in names of files.
    run_id = f"mcore-rl-{hashlib.blake2b(key, digest_size=8).hexdigest()}"
    return on_cuda(environment, find_memory_saver(sglang_python())) | {"SGLANG_RUN_ID": run_id}


def _on_cpu(environment: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    cores = "|".join(_cores(num_ranks, environment["OMP_NUM_THREADS"]))
    return {**environment, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores}


def on_cuda(environment: Mapping[str, str], memory_saver: MemorySaver) -> dict[str, str]:
    """Return the environment of a rank on a GPU."""
    changed = {**CUDA_DEFAULTS, **environment, **CUDA_VARIABLES}
    added = {"LD_PRELOAD": memory_saver.library, "LD_LIBRARY_PATH": memory_saver.cuda_runtime}
    for name, path in added.items():
        if path is not None:
            changed[name] = ":".join(filter(None, (str(path), environment.get(name))))
    for name in ALLOCATOR_VARIABLES:
        options = [each for each in changed.pop(name, "").split(",") if each.strip()]
        if kept := [each for each in options if each.partition(":")[0].strip() != _NOT_PAUSABLE]:
            changed[name] = ",".join(kept)
    return changed


def find_memory_saver(python: Path) -> MemorySaver:
    """Find torch_memory_saver in the environment of an interpreter, for the CUDA version of its torch.

    Raises: ConfigError if torch is built without CUDA, or if torch_memory_saver is not installed.
    """
    remedy = f"run `make sglang EXTRA=gpu`, or set {SGLANG_PYTHON} to the interpreter of an environment that has it"
    for packages in python.absolute().parent.parent.glob("lib/python3*/site-packages"):
        version = packages / "torch" / "version.py"
        built_for = re.search(r"^cuda\b.*= *'(\d+)\.", version.read_text() if version.is_file() else "", re.MULTILINE)
        if built_for is None:
            raise ConfigError(f"SGLang on GPUs needs PyTorch with CUDA, which {packages} does not have; {remedy}")
        major = built_for[1]
        runtimes = packages.glob(f"nvidia/**/libcudart.so.{major}")
        for library in packages.glob(f"torch_memory_saver_hook_mode_preload_cu{major}.*so"):
            return MemorySaver(library, next((runtime.parent for runtime in runtimes), None))
        raise ConfigError(
            f"SGLang on GPUs needs torch_memory_saver for CUDA {major}, which {packages} does not have; {remedy}"
        )
    raise ConfigError(f"{python} belongs to no virtual environment; {remedy}")


def _cores(num_ranks: int, threads: str) -> Sequence[str]:
    """Return the cores of each rank, one per thread, because SGLang requires a list.

    threads: as in OMP_NUM_THREADS, which may have a number per nesting level; a value that OpenMP rejects counts as 1.
    """
    present = sorted(os.sched_getaffinity(0))
    outermost = threads.split(",", maxsplit=1)[0].strip()
    num_threads = min(max(1, int(outermost)), len(present)) if outermost.isdecimal() else 1
    cores = [str(present[thread % len(present)]) for thread in range(num_ranks * num_threads)]
    return [",".join(cores[first : first + num_threads]) for first in range(0, len(cores), num_threads)]
