"""Canonical names of a live model's tensors: global layer and expert indices, one spelling for every layer spec.

| live name, by spec | canonical |
|---|---|
| `decoder.layers.{local}` | `decoder.layers.{global}` |
| `self_attention.linear_qkv.layer_norm_weight` (TransformerEngine fuses the norm) | `input_layernorm.weight` |
| `self_attention.linear_q_up_proj.layer_norm_weight` | `self_attention.q_layernorm.weight`; `kv` likewise |
| `mlp.linear_fc1.layer_norm_weight` | `pre_mlp_layernorm.weight` |
| `mlp.experts.local_experts.{local}.linear_fc1.weight` (SequentialMLP) | `mlp.experts.linear_fc1.weight{global}` |
| `mlp.experts.linear_fc1.weight{local}` (TEGroupedMLP) | `mlp.experts.linear_fc1.weight{global}` |

`output_layer.weight` exists where the live model has one: with tied embeddings that is the copy on the last of
several stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from mcore_rl.megatron import cpu
from mcore_rl.megatron.output import PolicyModel, unwrap

cpu.install()

from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}
_OUTSIDE_LAYERS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
_IN_LAYER = re.compile(
    r"(input_layernorm|pre_mlp_layernorm|self_attention\.(q_layernorm|k_layernorm|linear_qkv|linear_proj"
    r"|linear_q_proj|linear_(q|kv)_(down|up)_proj|kv_layernorm)"
    r"|mlp\.(linear_fc1|linear_fc2|router|shared_experts\.linear_fc[12]))\.(weight|bias)|mlp\.router\.expert_bias"
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


def canonical_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Everything that this rank holds, live (writing to a value writes the model), by canonical global name:
    parameters, and the buffers that belong to the model's weights (the router's expert bias).

    Raises: KeyError for a tensor whose name this table does not know, or two that get the same name.
    """
    named: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        for live_name, tensor in _live_tensors(model):
            name = _canonical_name(model, live_name)
            if name in named:
                raise KeyError(f"{live_name}: a second tensor is called {name}")
            named[name] = tensor.data
    return named


def _live_tensors(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("router.expert_bias"):
            yield name, buffer


def _canonical_name(model: PolicyModel, live_name: str) -> str:
    if live_name in _OUTSIDE_LAYERS:
        return live_name
    matched = _LAYER.fullmatch(live_name)
    if matched:
        layer = model.decoder.layers[int(matched[1])]
        prefix = f"decoder.layers.{layer.layer_number - 1}."
        inner = _FUSED_NORMS.get(matched[2], matched[2])
        if _IN_LAYER.fullmatch(inner):
            return prefix + inner
        expert = _SEQUENTIAL_EXPERT.fullmatch(inner)
        if expert:
            return f"{prefix}mlp.experts.{expert[2]}.weight{_global_expert(layer.mlp, int(expert[1]))}"
        expert = _GROUPED_EXPERT.fullmatch(inner)
        if expert:
            return f"{prefix}mlp.experts.{expert[1]}.weight{_global_expert(layer.mlp, int(expert[2]))}"
    raise KeyError(f"no canonical name is known for {live_name}; add it to mcore_rl/megatron/names.py")


def _global_expert(layer: MoELayer, local: int) -> int:
    return int(layer.local_expert_indices[local])
