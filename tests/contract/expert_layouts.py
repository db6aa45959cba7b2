"""Experts in the layouts of vLLM's GPU kernels, read back. Runs in the process of a vLLM engine, on its device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BACKENDS = ("TRITON", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM")
NUM_EXPERTS, HIDDEN = 3, 256
INNER = (256, 192)
"""Intermediate sizes per rank; the TRTLLM kernels pad the second one to 256."""


def layouts_read_wrongly(engine: Any) -> list[str]:
    """Convert experts with vLLM's function and read them back. Returns the backends, sizes and tensors that differ."""
    device = engine._engine.vllm_config.device_config.device
    with nullcontext() if device.type == "cuda" else fake_flashinfer():
        return [
            f"{backend} {inner} {name}"
            for backend in BACKENDS
            for inner in INNER
            for name, equal in read_back(backend, inner, device).items()
            if not equal
        ]


def read_back(backend: str, inner: int, device: torch.device) -> dict[str, bool]:
    """Return whether each tensor is read as it was before the conversion."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from mcore_rl.engines.vllm.held_weights import _experts

    generator = torch.Generator().manual_seed(inner)
    gate, up = (torch.randn(NUM_EXPERTS, inner, HIDDEN, generator=generator).to(device, torch.bfloat16) for _ in "ab")
    down = torch.randn(NUM_EXPERTS, HIDDEN, inner, generator=generator).to(device, torch.bfloat16)
    kind = unquantized.UnquantizedMoeBackend[backend]
    config = SimpleNamespace(
        is_act_and_mul=True,
        has_bias=False,
        intermediate_size_per_partition=inner,
        intermediate_size_per_partition_unpadded=inner,
    )
    w13, w2 = unquantized.convert_to_unquantized_kernel_format(kind, config, torch.cat([gate, up], 1), down.clone())
    assert backend == "TRITON" or not w13.equal(torch.cat([gate, up], 1))
    module = SimpleNamespace(
        quant_method=SimpleNamespace(unquantized_backend=kind),
        moe_config=config,
        activation=MoEActivation.SILU,
        w13_weight=w13,
        w2_weight=w2,
        expert_map=None,
        ckpt_gate_proj_name="gate_proj",
        ckpt_up_proj_name="up_proj",
        ckpt_down_proj_name="down_proj",
    )
    expected = {
        f"experts.{expert}.{name}.weight": matrices[expert]
        for name, matrices in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
        for expert in range(NUM_EXPERTS)
    }
    held = dict(_experts(module, "experts.routed_experts"))
    assert held.keys() == expected.keys()
    return {name: held[name].equal(tensor) for name, tensor in expected.items()}


@contextmanager
def fake_flashinfer() -> Iterator[None]:
    """Replace FlashInfer, which is not installed for CPUs, by functions that choose some order of the rows."""

    def order(cache: object, matrix: torch.Tensor, tile: int, is_gated_act_gemm: bool = True) -> torch.Tensor:
        return torch.randperm(len(matrix), generator=torch.Generator().manual_seed(len(matrix)))

    core = ModuleType("flashinfer.fused_moe.core")
    core._maybe_get_cached_w3_w1_permute_indices = core.get_w2_permute_indices_with_cache = order
    names = ("flashinfer", "flashinfer.fused_moe", core.__name__)
    assert not any(name in sys.modules for name in names)
    sys.modules |= {names[0]: ModuleType(names[0]), names[1]: ModuleType(names[1]), names[2]: core}
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
