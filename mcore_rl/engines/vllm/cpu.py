"""What vLLM 0.32 does slowly on this platform: norms in eager torch.

Importing this module registers its own compiled norms, which the engine argument IR_OP_PRIORITY chooses.
"""

from __future__ import annotations

import torch
from vllm import ir
from vllm.platforms import current_platform

PROVIDER = "mcore_rl_cpu"
IR_OP_PRIORITY = {"rms_norm": [PROVIDER, "native"], "fused_add_rms_norm": [PROVIDER, "native"]}
"""vLLM registers its compiled norms for GPUs alone, though its CPU build contains them."""


_LANES = 8
"""Elements that the kernels take at a time; they refuse rows of another multiple."""


def _plain(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % _LANES == 0


def _plain_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _plain(x, weight, variance_size)


def _plain_fused_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _plain(x, weight, variance_size)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # the kernel reads rows one after the other, whatever the strides say
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_residual = x.contiguous(), x_residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


if current_platform.is_cpu():
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_plain_norm)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_plain_fused_norm, inplace=True)(fused_add_rms_norm)
