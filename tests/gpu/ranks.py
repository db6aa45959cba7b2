"""Rank processes of the tests on GPUs, and what they share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.distributed.launch import launch

TIMEOUT_SECONDS = 300.0
"""A process on a GPU imports everything anew, and its first calls compile and load kernels."""


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
    """From now on the same inputs give the same bits in this process: sums on a GPU are otherwise in any order."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # What has no repeatable kernel warns; it does not occur where these tests compare bits.
    torch.use_deterministic_algorithms(True, warn_only=True)
