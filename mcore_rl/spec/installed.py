"""What of the packages that megatron can use is installed, without importing any of them. Standard library only, so
that `mcore-rl doctor` can ask on a machine that has nothing yet."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-torch", "transformer_engine")


def version_of(distributions: Sequence[str]) -> tuple[str, str] | None:
    """(name, version) of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def has_module(name: str) -> bool:
    """Whether a top-level module could be found; imports nothing."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True)
class Installed:
    """Facts that decide what a model is built from. `transformer_engine` is its version; `capability` that of the
    CUDA device, None where it is not known; `gradient_fusion` the kernel of NVIDIA's apex."""

    cuda: bool = False
    capability: tuple[int, int] | None = None
    transformer_engine: str | None = None
    flash_attention: bool = False
    gradient_fusion: bool = False
    deep_ep: bool = False


def look(*, cuda: bool, capability: tuple[int, int] | None = None) -> Installed:
    """What this Python has, for processes that have a CUDA device or not."""
    engine = version_of(TRANSFORMER_ENGINE) if has_module("transformer_engine") else None
    return Installed(
        cuda=cuda,
        capability=capability,
        transformer_engine=engine[1] if engine else None,
        flash_attention=has_module("flash_attn"),
        gradient_fusion=has_module("fused_weight_gradient_mlp_cuda"),
        deep_ep=has_module("deep_ep"),
    )


def planned_machine(*, cuda: bool) -> Installed:
    """What a plan takes for granted of the machines that it is for, whatever this one has: with GPUs the packages that
    scripts/setup.sh installs for them, and deep_ep for those who ask for it by name."""
    if not cuda:
        return Installed()
    return Installed(cuda=True, transformer_engine="2.11", flash_attention=True, gradient_fusion=True, deep_ep=True)
