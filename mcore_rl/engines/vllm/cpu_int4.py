"""INT4 experts in plain torch for vLLM 0.32 on CPU.

Importing this module replaces vLLM's kernel for them on every CPU. The kernel needs AMX, rounds activations to 8 bits,
so that log-probabilities differ from every other computation with these weights, and keeps words in tiles that cannot
be compared. Here words and scales stay as they were loaded. A product uses code * scale, rounded to bfloat16, and
converts its weight each time, so this is slower than bfloat16.
"""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kInt4Static, kInt4Static32
from vllm.platforms import current_platform

from mcore_rl.engines.vllm.cpu import mapping_experts, quantised_experts
from mcore_rl.weights.int4 import dequantised


def _is_supported(*unused: object) -> bool:
    """Replace two conditions of vLLM's kernel: AMX, and certain routers."""
    return True


def _supports_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
    """Accept symmetric INT4 in groups of any size. vLLM's kernel rejects groups of 32."""
    return activation_key is None and weight_key in (kInt4Static, kInt4Static32)


def _keep_experts(*, layer: RoutedExperts, **unused: object) -> None:
    """Replace the conversion to the format of a kernel. Returns None: nothing was converted."""
    layer.w13_weight, layer.w2_weight = layer.w13_weight_packed, layer.w2_weight_packed


# Workers on GPUs import this module too.
if current_platform.is_cpu():
    experts = cpu_moe.CPUExpertsInt4
    experts.apply = mapping_experts(quantised_experts(dequantised))
    experts._supports_current_device = experts._supports_routing_method = staticmethod(_is_supported)
    experts._supports_quant_scheme = staticmethod(_supports_scheme)
    wna16.convert_to_wna16_moe_kernel_format = _keep_experts
