"""Canonical names of a model's tensors: global layer and expert indices, the same for every layer spec.

| name in the model, by spec | canonical name |
|---|---|
| `decoder.layers.{local}` | `decoder.layers.{global}` |
| `self_attention.linear_qkv.layer_norm_weight` (TransformerEngine fuses the norm) | `input_layernorm.weight` |
| `self_attention.in_proj.layer_norm_weight` (linear attention) | `input_layernorm.weight` |
| `self_attention.linear_q_up_proj.layer_norm_weight` | `self_attention.q_layernorm.weight`; `kv` likewise |
| `mlp.linear_fc1.layer_norm_weight` | `pre_mlp_layernorm.weight` |
| `mlp.experts.local_experts.{local}.linear_fc1.weight` (SequentialMLP) | `mlp.experts.linear_fc1.weight{global}` |
| `mlp.experts.linear_fc1.weight{local}` (TEGroupedMLP) | `mlp.experts.linear_fc1.weight{global}`; `bias` likewise |

Multi-token-prediction layers are `mtp.layers.{m}`, with a decoder layer under `transformer_layer`. With several
pipeline stages, the last stage then has a copy of the embedding.

A vision tower has the same names in every model: `vision.` and the name of its parameter.

The canonical names of a model of transformers (huggingface/model.py) are the names of its HF checkpoint. Its stacked
experts are separate tensors, of which a rank has those that it stores.

`output_layer.weight` is present if the model has this tensor. With tied embeddings and several pipeline stages it is
the copy of the embedding on the last stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from mcore_rl.megatron.model.output import ModelChunk, unwrap
from mcore_rl.megatron.model.shards import local_shard, shard_of
from model_converters.families.parts.vision import MCORE_PREFIX

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}
_OUTSIDE_LAYERS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
_IN_LAYER = re.compile(
    r"((input|pre_mlp|post_self_attn|post_mlp)_layernorm|self_attention\.(q_layernorm|k_layernorm|linear_qkv|linear_proj"
    r"|linear_q_proj|linear_(q|kv)_(down|up)_proj|kv_layernorm)"
    r"|mlp\.(linear_fc1|linear_fc2|router|shared_experts\.linear_fc[12]))\.(weight|bias)|mlp\.router\.expert_bias"
    r"|self_attention\.core_attention\.softmax_offset"
    r"|self_attention\.core_attention\.indexer\.(linear_(wq_b|wk|weights_proj)\.weight|k_norm\.(weight|bias))"
    r"|self_attention\.(in_proj|conv1d|out_norm|out_proj)\.weight|self_attention\.(A_log|dt_bias)"
    r"|mlp\.shared_experts\.gate_weight"
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.transformer_layer\.(.+)")
_IN_MTP = re.compile(r"mtp\.layers\.\d+\.(enorm|hnorm|eh_proj|final_layernorm)\.weight")
_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


def canonical_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return all weights of this rank by canonical name: parameters, and the router's expert bias, which is a buffer.
    The tensors share memory with the model. With sharded parameters they contain this rank's rows only.

    Raises: KeyError for a tensor without a canonical name, or for two tensors with the same name.
    """
    named: dict[str, torch.Tensor] = {}
    for _, parts in stored_tensors(chunks):
        if twice := named.keys() & parts.keys():
            raise KeyError(f"two tensors have the canonical name {min(twice)}")
        named |= parts
    return named


def stored_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
    """Yield each weight that this rank stores, and its parts by canonical name. They share memory with the model.

    Raises: KeyError for a tensor without a canonical name.
    """
    for chunk in chunks:
        model = unwrap(chunk)
        for live_name, tensor in named_weights(model):
            shard = local_shard(tensor)
            yield tensor if shard is None else shard, _canonical_parts(model, live_name, tensor)


def trained_names(chunks: Sequence[torch.nn.Module]) -> set[str]:
    """Return the canonical names of all parameters of this rank that are trained, without adapters."""
    models = map(unwrap, chunks)
    weights = ((model, name, tensor) for model in models for name, tensor in named_weights(model))
    trained = (_canonical_parts(model, name, tensor) for model, name, tensor in weights if tensor.requires_grad)
    return {part for parts in trained for part in parts}


def named_weights(model: ModelChunk) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and the expert biases of routers, by their names in the model."""
    # Adapters are not weights of the base model; see lora.adapters.adapter_parameters.
    yield from ((name, parameter) for name, parameter in model.named_parameters() if ".adapter." not in name)
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def _canonical_parts(model: ModelChunk, live_name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    shard = local_shard(tensor)
    # Not the parameter itself: consumers copy into the tensor, which autograd would reject.
    stored = tensor.data if shard is None else shard.data
    if not model.has_hf_names:
        return {canonical_name(model, live_name): stored}
    place = None if shard is None else shard_of(shard)
    return model.hf_tensors(live_name, stored, 0 if place is None else place.first_row)


def canonical_name(model: ModelChunk, live_name: str) -> str:
    """Map a name of this chunk's tensors to its canonical name. Raises: KeyError for an unknown name."""
    outside = live_name in _OUTSIDE_LAYERS or live_name.startswith(MCORE_PREFIX)
    if model.has_hf_names or outside or _IN_MTP.fullmatch(live_name):
        return live_name
    canonical = None
    if matched := _LAYER.fullmatch(live_name):
        layer = model.decoder.layers[int(matched[1])]
        canonical = _in_layer(f"decoder.layers.{layer.layer_number - 1}.", layer, matched[2])
    elif matched := _MTP_LAYER.fullmatch(live_name):
        layer = model.mtp.layers[int(matched[1])].transformer_layer
        canonical = _in_layer(f"mtp.layers.{matched[1]}.transformer_layer.", layer, matched[2])
    if canonical is None:
        raise KeyError(f"{live_name} has no canonical name; add it to mcore_rl/megatron/model/names.py")
    return canonical


def _in_layer(prefix: str, layer: TransformerLayer, inner: str) -> str | None:
    inner = _FUSED_NORMS.get(inner, inner)
    if _IN_LAYER.fullmatch(inner):
        return prefix + inner
    if expert := _SEQUENTIAL_EXPERT.fullmatch(inner):
        return f"{prefix}mlp.experts.{expert[2]}.{expert[3]}{_global_expert(layer.mlp, int(expert[1]))}"
    if expert := _GROUPED_EXPERT.fullmatch(inner):
        return f"{prefix}mlp.experts.{expert[1]}.{expert[2]}{_global_expert(layer.mlp, int(expert[3]))}"
    return None


def _global_expert(layer: MoELayer, local: int) -> int:
    return int(layer.local_expert_indices[local])
