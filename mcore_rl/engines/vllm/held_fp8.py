"""FP8 codes and scales that vLLM's kernels use, as parts of HF tensors.

vLLM 0.32's kernels for CPUs with AMX permute the codes. The kernels of `cpu_fp8`, and Triton's on GPUs, keep their
order; the layouts of other kernels on GPUs are unknown. A reload copies codes and scales of experts into the memory of
the earlier ones, but the new kernel uses the scales that it was built with. Therefore the kernel's scales are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.platforms import current_platform

from mcore_rl.config.quantization import BLOCK
from mcore_rl.engines.held_weights import SCALES, Held, linear_parts, unknown_layout
from mcore_rl.engines.vllm.cpu_fp8 import PACKS_CODES, dequantised
from mcore_rl.engines.vllm.packing import unpacked

PLAIN_EXPERTS = (Fp8MoeBackend.CPU, Fp8MoeBackend.TRITON, Fp8MoeBackend.BATCHED_TRITON)
"""Backends of experts with the checkpoint's order of rows and columns, except that the first may permute codes."""


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Permute codes for AMX. Shapes: [experts, rows, columns], unchanged."""
    return torch.ops._C.convert_weight_packed(codes)


def linear_codes(module: LinearBase, name: str) -> Iterator[Held]:
    """Yield codes and scales of the HF tensors in a linear module.

    Raises: WeightSyncError for an unknown layout.
    """
    codes, scales = _codes_and_scales(module, name)
    return linear_parts(module, name, codes, scales)


def expert_codes(module: RoutedExperts, prefix: str, own_experts: list[int]) -> Iterator[Held]:
    """Yield codes and scales of this rank's experts. `prefix`: name of the layer's experts.

    Raises: WeightSyncError for an unknown layout.
    """
    method = module.quant_method
    if method.fp8_backend not in PLAIN_EXPERTS or method.moe_kernel is None:
        raise unknown_layout(prefix, f"FP8 experts of vLLM's {method.fp8_backend.value}")
    kernel = method.moe_kernel.fused_experts
    _require_plain(prefix, module.w13_weight, kernel.w1_scale)
    _require_plain(prefix, module.w2_weight, kernel.w2_scale)
    read = _reader(packed=PACKS_CODES and current_platform.is_cpu())
    gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    for own, expert in enumerate(own_experts):
        fused = ((read(module.w13_weight[own].detach()), "weight"), (kernel.w1_scale[own], SCALES))
        for both, key in fused:
            for part, tensor in zip((gate, up), both.chunk(2), strict=True):
                yield f"{prefix}.{expert}.{part}.{key}", tensor
        yield f"{prefix}.{expert}.{down}.weight", read(module.w2_weight[own].detach())
        yield f"{prefix}.{expert}.{down}.{SCALES}", kernel.w2_scale[own]


def absorbed_differ(module: LinearBase, name: str, absorbed: torch.Tensor) -> bool:
    """Return whether the copies of a projection that latent attention keeps differ from its codes and scales. True for
    a projection without codes, of which nothing else can be read.

    Shapes: absorbed [rows, columns], dequantised.
    """
    if not isinstance(module.quant_method, Fp8LinearMethod):
        return True
    codes, scales = _codes_and_scales(module, name)
    return not torch.equal(dequantised(codes, scales, absorbed.dtype), absorbed)


def _codes_and_scales(module: LinearBase, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    own = dict(module.named_parameters(recurse=False))
    codes, scales = own["weight"].detach(), own["weight_scale_inv"].detach()
    _require_plain(name, codes, scales)
    on_cpu = isinstance(module.quant_method.fp8_linear, CPUFp8BlockScaledMMKernel)
    # vLLM does not pack a projection that latent attention absorbs.
    packed = on_cpu and PACKS_CODES and not getattr(module, "_cpu_skip_gemm_dispatch", False)
    return _reader(packed=packed)(codes), scales


def _require_plain(name: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Raises: WeightSyncError unless codes and scales have the checkpoint's dtypes and shapes."""
    blocks = tuple(-(-size // BLOCK) for size in codes.shape[-2:])
    dtypes = (codes.dtype, scales.dtype)
    if dtypes != (torch.float8_e4m3fn, torch.float32) or tuple(scales.shape[-2:]) != blocks:
        raise unknown_layout(name, f"FP8 weights {list(codes.shape)} with scales {scales.dtype} {list(scales.shape)}")


def _reader(*, packed: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(unpacked, pack=pack_codes) if packed else lambda codes: codes
