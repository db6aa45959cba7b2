"""What keys that are left to the machine mean on one."""

from __future__ import annotations

from mcore_rl.config.schema import ClusterConfig, Config


def uses_cuda(cluster: ClusterConfig) -> bool:
    """Whether ranks and engines run on GPUs."""
    if cluster.device != "auto":
        return cluster.device == "cuda"
    import torch

    return torch.cuda.is_available()


def settled_dtype(dtype: str, *, cuda: bool) -> str:
    """What model.dtype=auto means: bfloat16 on GPUs, whose attention takes nothing else, float32 on the CPU, whose
    kernels are fastest with it; every other as it is."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if cuda else "float32"


def settle_dtype(config: Config, *, cuda: bool) -> None:
    """Puts what model.dtype means into its place, for everyone who asks later, config.yaml included."""
    config.model.dtype = settled_dtype(config.model.dtype, cuda=cuda)
