"""INT4 words and scales of experts that vLLM's kernels use, as parts of HF tensors.

The kernel of `cpu_int4` keeps them as they were loaded. The layouts of kernels on GPUs (Marlin and others permute
words and scales) are unknown. A reload copies into the memory of the earlier parameters, but the new kernel uses the
scales that it was built with. Therefore the kernel's scales are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from mcore_rl.engines.held_weights import Held, unknown_layout
from mcore_rl.weights.int4 import CODES_PER_WORD, PACKED_SUFFIX, SCALE_DTYPE, SCALE_SUFFIX, WORD_DTYPE


def expert_words(module: RoutedExperts, prefix: str, own_experts: list[int]) -> Iterator[Held]:
    """Yield words and scales of this rank's experts. `prefix`: name of the layer's experts.

    Raises: WeightSyncError for an unknown layout.
    """
    method = module.quant_method
    kernel = None if method.moe_kernel is None else method.moe_kernel.fused_experts
    if not isinstance(kernel, CPUExpertsInt4):
        raise unknown_layout(prefix, f"INT4 experts of vLLM's {method.wna16_backend.value}")
    _require_plain(prefix, module.w13_weight, kernel.w1_scale, method.group_size)
    _require_plain(prefix, module.w2_weight, kernel.w2_scale, method.group_size)
    gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    for own, expert in enumerate(own_experts):
        fused = ((module.w13_weight[own].detach(), PACKED_SUFFIX), (kernel.w1_scale[own], SCALE_SUFFIX))
        for both, suffix in fused:
            for part, tensor in zip((gate, up), both.chunk(2), strict=True):
                yield f"{prefix}.{expert}.{part}.weight{suffix}", tensor
        yield f"{prefix}.{expert}.{down}.weight{PACKED_SUFFIX}", module.w2_weight[own].detach()
        yield f"{prefix}.{expert}.{down}.weight{SCALE_SUFFIX}", kernel.w2_scale[own]


def _require_plain(name: str, words: torch.Tensor, scales: torch.Tensor, group: int) -> None:
    """Raises: WeightSyncError unless words and scales have the checkpoint's dtypes and shapes."""
    expected = (*words.shape[:-1], words.shape[-1] * CODES_PER_WORD // group)
    if (words.dtype, scales.dtype) != (WORD_DTYPE, SCALE_DTYPE) or tuple(scales.shape) != expected:
        raise unknown_layout(name, f"INT4 weights {list(words.shape)} with scales {scales.dtype} {list(scales.shape)}")
