"""Defaults that depend on the machine."""

from __future__ import annotations

from mcore_rl.config.schema import ClusterConfig, ModelConfig


def uses_cuda(cluster: ClusterConfig) -> bool:
    """Return True if ranks and engines run on GPUs."""
    if cluster.device != "auto":
        return cluster.device == "cuda"
    # Imported only if needed: the configuration must be readable without torch.
    import torch

    return torch.cuda.is_available()


def resolved_dtype(dtype: str, *, cuda: bool) -> str:
    """Resolve model.dtype=auto: bfloat16 on GPUs, whose attention kernels need it; float32 on CPU, where it is
    fastest."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if cuda else "float32"


def resolve_dtype(model: ModelConfig, *, cuda: bool) -> None:
    """Replace model.dtype=auto in the configuration, which is also written to config.yaml."""
    model.dtype = resolved_dtype(model.dtype, cuda=cuda)
