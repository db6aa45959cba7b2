"""Weights that SGLang's kernels use, as parts of HF tensors (runs in SGLang's environment).

On CPUs without AMX, SGLang does not pack its parameters: query, key and value projections are concatenated, and so are
gate and up projections. The inner dimension of an MLP is padded with zeros to a multiple of 32 per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.shard_map import Box

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's fused modules, and the HF modules in each, in the order of their rows."""
EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down projection: in most families, and in Mixtral."""
Held = tuple[str, torch.Tensor]


@torch.no_grad()
def held_tensors(model: torch.nn.Module, boxes: Mapping[str, Box]) -> Iterator[Held]:
    """Yield the parts of HF tensors that this rank holds. `boxes`: the expected part of each tensor.

    Raises: WeightSyncError for a module whose layout is unknown, and for padding that is not zero.
    """
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            for hf_name, tensor in _read(module, name, boxes):
                yield hf_name, _without_padding(hf_name, tensor, boxes)


def vocabulary_padding(model: torch.nn.Module) -> list[str]:
    """Return the vocabulary modules whose part on this rank is padding only."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding) and not module.shard_indices.num_org_elements
    ]


def _without_padding(name: str, tensor: torch.Tensor, boxes: Mapping[str, Box]) -> torch.Tensor:
    size = boxes[name][1] if name in boxes else tuple(tensor.shape)
    for dim, length in enumerate(size):
        if tensor.shape[dim] > length:
            if tensor.narrow(dim, length, tensor.shape[dim] - length).any():
                raise WeightSyncError(f"{name}: SGLang's padding is not zero")
            tensor = tensor.narrow(dim, 0, length)
    return tensor


def _read(module: torch.nn.Module, name: str, boxes: Mapping[str, Box]) -> Iterator[Held]:
    method = getattr(module, "quant_method", None)
    if getattr(module, "use_intel_amx_backend", False):
        raise WeightSyncError(f"{name}: weights packed for AMX cannot be read back; set weights.verify_every to 0")
    if isinstance(module, VocabParallelEmbedding) and isinstance(method, UnquantizedEmbeddingMethod):
        if module.shard_indices.num_org_elements:
            yield f"{name}.weight", module.weight[: module.shard_indices.num_org_elements]
    elif isinstance(module, LinearBase) and isinstance(method, UnquantizedLinearMethod):
        yield from _linear(module, name)
    elif isinstance(module, FusedMoE) and isinstance(method, UnquantizedFusedMoEMethod):
        # The boxes show which of the two naming schemes the model has.
        yield from _experts(module, name, EXPERT_PARTS[f"{name}.0.w1.weight" in boxes])
    elif method is None:
        for key, parameter in module.named_parameters(recurse=False):
            yield f"{name}.{key}", parameter
    else:
        raise WeightSyncError(
            f"{name}: the layout of {type(method).__name__} is unknown; set weights.verify_every to 0"
        )


def _linear(module: LinearBase, name: str) -> Iterator[Held]:
    prefix, _, last = name.rpartition(".")
    sizes = _rows(module)
    parts = PARTS[last] if len(sizes) > 1 else (last,)
    for key in ("weight", "bias"):
        if getattr(module, key, None) is not None:
            pieces = getattr(module, key).split(sizes, dim=0)
            yield from ((f"{prefix}.{part}.{key}", piece) for part, piece in zip(parts, pieces, strict=True))


def _rows(module: LinearBase) -> list[int]:
    """Return the number of rows of each HF module in a fused module."""
    if isinstance(module, QKVParallelLinear):
        key_rows = module.num_kv_heads * module.head_size
        return [module.num_heads * module.head_size, key_rows, module.num_kv_heads * module.v_head_size]
    if isinstance(module, MergedColumnParallelLinear):
        return list(module.output_partition_sizes)
    if isinstance(module, ColumnParallelLinear):
        return [module.output_size_per_partition]
    assert isinstance(module, RowParallelLinear) or type(module).__name__ == "ReplicatedLinear", type(module)
    return [module.output_size]


def _experts(module: FusedMoE, name: str, parts: tuple[str, str, str]) -> Iterator[Held]:
    if module.moe_ep_size > 1:
        raise WeightSyncError(f"{name}: experts divided over ranks cannot be read back; set weights.verify_every to 0")
    # w13 stacks gate and up, each padded to the same number of rows.
    padded = module.w13_weight.shape[1] // 2
    gate, up, down = parts
    for expert, (rows, columns) in enumerate(zip(module.w13_weight, module.w2_weight, strict=True)):
        yield f"{name}.{expert}.{gate}.weight", rows[:padded]
        yield f"{name}.{expert}.{up}.weight", rows[padded:]
        yield f"{name}.{expert}.{down}.weight", columns
