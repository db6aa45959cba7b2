"""Block-wise FP8 in plain torch for vLLM 0.32 on CPUs without AMX, which vLLM's own kernels for it need.

Importing this module replaces the kernels on such CPUs. On every CPU it makes experts in FP8 apply the map to the
rank's own experts, as `cpu` does for others. Weights keep the codes and scales that were loaded. A product
uses code * scale, rounded to bfloat16; activations are not quantised, as in vLLM's kernels for CPUs with AMX. Every
product converts its weight, so this is slower than bfloat16.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.platforms import current_platform

from mcore_rl.config.quantization import BLOCK
from mcore_rl.engines.vllm.cpu import mapping_experts, quantised_experts

PACKS_CODES = torch.cpu._is_amx_tile_supported()
"""True if vLLM's own kernels run on this CPU, which permute the codes."""


def dequantised(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply codes with the scales of their blocks.

    Shapes: codes [rows, columns], scales [ceil(rows / BLOCK), ceil(columns / BLOCK)] -> [rows, columns].
    """
    rows, columns = codes.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.float() * spread).to(dtype)


def _linear_is_supported(
    cls: type[CPUFp8BlockScaledMMKernel], compute_capability: int | None = None
) -> tuple[bool, str | None]:
    return True, None


def _keep_weights(self: CPUFp8BlockScaledMMKernel, layer: torch.nn.Module) -> None:
    """Replace process_weights_after_loading, which packs the codes for AMX."""


def _apply_linear(
    self: CPUFp8BlockScaledMMKernel,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Replace CPUFp8BlockScaledMMKernel.apply_weights."""
    return linear(x, dequantised(layer.weight, layer.weight_scale_inv, x.dtype), bias)


def _experts_are_supported() -> bool:
    return True


def _keep_experts(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace prepare_fp8_moe_layer_for_cpu, which packs the codes for AMX."""
    return w13, w2


# Workers on GPUs import this module too.
if current_platform.is_cpu():
    apply = cpu_moe.CPUExpertsFp8.apply if PACKS_CODES else quantised_experts(dequantised)
    cpu_moe.CPUExpertsFp8.apply = mapping_experts(apply)
if current_platform.is_cpu() and not PACKS_CODES:
    CPUFp8BlockScaledMMKernel.is_supported = classmethod(_linear_is_supported)
    CPUFp8BlockScaledMMKernel.process_weights_after_loading = _keep_weights
    CPUFp8BlockScaledMMKernel.apply_weights = _apply_linear
    cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(_experts_are_supported)
    cpu_moe.prepare_fp8_moe_layer_for_cpu = _keep_experts
