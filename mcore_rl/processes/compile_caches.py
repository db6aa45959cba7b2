"""Directories in which ranks and engines keep compiled GPU kernels: on the node, shared by the runs of a user.

The packages' defaults are in the home directory. On a cluster it is often shared storage, on which hundreds of
processes would compile into one directory at the same time: locks are slow there, and files can be read half-written.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

PARENT = Path("/tmp")
"""Not TMPDIR: for the processes of a run it is a directory that is removed when the run ends."""
FOLDERS = {
    "CUDA_CACHE_PATH": "cuda",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Environment variable -> folder."""
DEEP_GEMM, DEEP_GEMM_OF_SGLANG = "DG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR"
"""Variables of DeepGEMM. SGLang (0.5.23) overwrites the first with the second, by default deep_gemm in
SGLANG_CACHE_DIR."""


def use_node_directories() -> None:
    """Set the variables that are unset, for this process and its children. Call it before they compile anything.

    Does nothing if the node's directory cannot be made, or belongs to another user, who could put code into it.
    """
    directory = PARENT / f"mcore-rl-{os.getuid()}"
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700)
    if DEEP_GEMM in os.environ and os.environ[DEEP_GEMM] != str(directory / FOLDERS[DEEP_GEMM]):
        os.environ.setdefault(DEEP_GEMM_OF_SGLANG, os.environ[DEEP_GEMM])  # the user's choice
    if _is_private(directory):
        for name, folder in FOLDERS.items():
            os.environ.setdefault(name, str(directory / folder))


def _is_private(directory: Path) -> bool:
    try:
        status = directory.lstat()  # a link would lead to a directory of somebody else's choice
    except OSError:
        return False
    others_can_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_can_write
