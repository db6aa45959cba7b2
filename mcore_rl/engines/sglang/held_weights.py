"""Weights that SGLang's kernels use, as parts of HF tensors (runs in SGLang's environment).

On CPUs without AMX and in most formats of CUDA, SGLang does not pack its parameters: query, key and value projections
are concatenated, and so are gate and up projections. On CPU the inner dimension of an MLP is padded with zeros to a
multiple of 32 per rank. Checked with SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from mcore_rl.engines.held_weights import (
    Held,
    Reader,
    linear_parts,
    modules_with_parameters,
    read_module,
    unknown_layout,
)
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.shard_map import Boxes

EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down projection: in most families, and in Mixtral."""
_TOWER = "model.visual."
"""Prefix of the HF names of a vision tower."""
LATENT_PROJECTION = "fused_qkv_a_proj_with_mqa"
"""Down-projections q_a_proj and kv_a_proj_with_mqa of latent attention, in this order of rows."""


def held_tensors(model: torch.nn.Module, boxes: Mapping[str, Boxes]) -> Iterator[Held]:
    """Yield the parts of HF tensors that this rank holds, one module at a time. `boxes`: the expected parts.

    Raises: WeightSyncError for a module whose memory layout is unknown.
    """
    readers: list[Reader] = [
        (VocabParallelEmbedding, UnquantizedEmbeddingMethod, _vocabulary),
        (LinearBase, UnquantizedLinearMethod, partial(_linear, boxes=boxes)),
        (FusedMoE, UnquantizedFusedMoEMethod, partial(_experts, boxes=boxes)),
    ]
    named = _hf_name if any(name.startswith(_TOWER) for name in boxes) else str
    for name, module in ((named(name), module) for name, module in modules_with_parameters(model)):
        if getattr(module, "use_intel_amx_backend", False):
            raise WeightSyncError(f"{name}: weights packed for AMX cannot be read back; set weights.verify_every to 0")
        for hf_name, tensor in read_module(module, name, readers):
            yield hf_name, _without_padding(hf_name, tensor, boxes)
    for name, module in model.named_modules():
        if hasattr(module, "w_kc"):
            yield _absorbed(module, f"{name}.kv_b_proj")


def _hf_name(name: str) -> str:
    """Return the HF name of a module of a model with a vision tower."""
    if name.startswith("visual."):
        return f"model.{name}".replace(".attn.qkv_proj", ".attn.qkv")
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _without_padding(name: str, tensor: torch.Tensor, boxes: Mapping[str, Boxes]) -> torch.Tensor:
    size = boxes[name][0][1] if name in boxes else tuple(tensor.shape)
    for dim, length in enumerate(size):
        if tensor.shape[dim] > length:
            if tensor.narrow(dim, length, tensor.shape[dim] - length).any():
                raise WeightSyncError(f"{name}: SGLang's padding is not zero")
            tensor = tensor.narrow(dim, 0, length)
    return tensor


def _vocabulary(module: VocabParallelEmbedding, name: str) -> list[Held]:
    return [(f"{name}.weight", module.weight[: module.shard_indices.num_org_elements])]


def _linear(module: LinearBase, name: str, boxes: Mapping[str, Boxes]) -> Iterator[Held]:
    prefix, _, last = name.rpartition(".")
    if last != LATENT_PROJECTION:
        yield from linear_parts(module, name, module.weight)
        return
    # A replicated projection has one output size only.
    names = [f"{prefix}.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    yield from zip(names, module.weight.split([boxes[each][0][1][0] for each in names]), strict=True)


def _absorbed(module: torch.nn.Module, name: str) -> Held:
    """Assemble kv_b_proj.weight from the copies that latent attention keeps.

    Decoding reads these copies, and only prefills on CUDA read the parameter, which is yielded under the same name: an
    update is complete only if both are equal to the trainer's tensor.

    Shapes: w_kc [heads, P, L] and w_vc [heads, L, V] -> [heads * (P + V), L].
    """
    if module.w_kc is None or module.w_vc is None:
        raise unknown_layout(name, "latent attention without w_kc and w_vc")
    return f"{name}.weight", torch.cat([module.w_kc, module.w_vc.transpose(1, 2)], dim=1).flatten(0, 1)


def _experts(module: FusedMoE, name: str, boxes: Mapping[str, Boxes]) -> Iterator[Held]:
    if module.quant_method.use_flashinfer_trtllm_moe:
        raise unknown_layout(name, "experts in the blocks of moe_runner_backend=flashinfer_trtllm")
    # w13 stacks gate and up, each padded to the same number of rows.
    padded = module.w13_weight.shape[1] // 2
    # The boxes show which of the two naming schemes the model has.
    first = module.moe_ep_rank * module._num_local_routed
    gate, up, down = EXPERT_PARTS[f"{name}.{first}.w1.weight" in boxes]
    if module.quant_method.load_up_proj_weight_first:
        gate, up = up, gate
    for own, (rows, columns) in enumerate(zip(module.w13_weight, module.w2_weight, strict=True)):
        prefix = f"{name}.{first + own}" if own < module._num_local_routed else _shared_experts(module, name)
        yield f"{prefix}.{gate}.weight", rows[:padded]
        yield f"{prefix}.{up}.weight", rows[padded:]
        yield f"{prefix}.{down}.weight", columns


def _shared_experts(module: FusedMoE, name: str) -> str:
    """Return the HF name of the shared expert that SGLang has put behind the routed ones."""
    if module.num_fused_shared_experts != 1:
        raise unknown_layout(name, f"{module.num_fused_shared_experts} fused shared experts")
    return f"{name.rpartition('.')[0]}.shared_experts"
