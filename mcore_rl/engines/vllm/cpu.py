"""Compiled norms for vLLM 0.32 on CPU, which otherwise runs norms in eager torch.

Importing this module registers vLLM's own compiled norms; the engine argument IR_OP_PRIORITY selects them.
"""

from __future__ import annotations

import torch
from vllm import ir
from vllm.platforms import current_platform

PROVIDER = "mcore_rl_cpu"
IR_OP_PRIORITY = {"rms_norm": [PROVIDER, "native"], "fused_add_rms_norm": [PROVIDER, "native"]}
"""Needed because vLLM registers its compiled norms only for GPUs, although its CPU build contains them."""


_LANES = 8
"""Vector length of the kernels. They reject rows whose length is not a multiple."""


def _supports(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % _LANES == 0


def _supports_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _supports(x, weight, variance_size)


def _supports_fused_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _supports(x, weight, variance_size)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # the kernel ignores strides
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
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_supports_norm)(rms_norm)
    register = ir.ops.fused_add_rms_norm.register_impl
    register(PROVIDER, supports_args=_supports_fused_norm, inplace=True)(fused_add_rms_norm)
