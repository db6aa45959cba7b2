"""Launch functions and helpers for ranks of GPU tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.distributed.launch import launch

TIMEOUT_SECONDS = 300.0
"""Each process on a GPU imports everything again, and its first calls compile and load kernels."""


def launch_local(function: Callable[..., Any], num_ranks: int, *args: Any, device: str) -> list[Any]:
    """Run `function` on `num_ranks` ranks with models of local layers: needs only torch and megatron-core."""
    return launch(_locally, num_ranks, function, *args, timeout_seconds=TIMEOUT_SECONDS, device=device)


def launch_installed(function: Callable[..., Any], num_ranks: int, *args: Any, device: str) -> list[Any]:
    """Run `function` on `num_ranks` ranks with models of the best layers that are installed."""
    return launch(function, num_ranks, *args, timeout_seconds=TIMEOUT_SECONDS, device=device)


def _locally(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    from mcore_rl.megatron.model import model

    look = model.here
    model.here = lambda: replace(look(), transformer_engine=None, gradient_fusion=False, deep_ep=False)
    return function(rank, *args)


def repeat_to_the_bit() -> None:
    """Make results bitwise repeatable in this process: by default, GPU kernels add in any order."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Kernels without a repeatable variant only warn; the tests that compare bits do not use any.
    torch.use_deterministic_algorithms(True, warn_only=True)
