"""Specifications of a chunk's layers: Megatron's own, with the modules replaced that do not support the actor's rows.

A family with layers of its own changes the specification of each layer here, in `_adapt_layer`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from mcore_rl.megatron.model.attention.chosen import use_chosen_attention
from mcore_rl.megatron.model.attention.packed import SDPACoreAttention
from mcore_rl.megatron.model.head_norm import use_head_norms
from mcore_rl.megatron.model.linear_attention.specs import gate_outputs, is_linear, use_linear_attention
from mcore_rl.megatron.model.mtp import DetachedMTPLayer
from mcore_rl.megatron.model.norm import local_norm
from mcore_rl.megatron.model.post_norms import use_post_norms
from mcore_rl.megatron.model.routers import use_policy_router
from mcore_rl.megatron.model.rows import fill_parameter


class LayerKind(NamedTuple):
    """Kind of the layers of a model.

    engine: they are TransformerEngine's. own_attention: their core attention is this project's, as in local layers.
    """

    engine: bool
    own_attention: bool


LOCAL = LayerKind(engine=False, own_attention=True)


def decoder_specs(config: TransformerConfig, kind: LayerKind, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the specification of a chunk's decoder layers. Megatron repeats one object for equal layers; here every
    layer has its own, so that single layers can be changed."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=kind.engine, normalization=config.normalization, vp_stage=vp_stage
    )
    spec.layer_specs = [deepcopy(layer) for layer in spec.layer_specs]
    use_linear_attention(spec.layer_specs, config, vp_stage)
    _replace_modules(spec, config, kind)
    return spec


def mtp_specs(
    config: TransformerConfig, spec: TransformerBlockSubmodules, kind: LayerKind, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the specification of the multi-token-prediction layers, built like the model's last layer, but never with
    linear attention.

    None if this chunk has none.
    """
    if not config.mtp_num_layers:
        return None
    if not spec.layer_specs or is_linear(spec.layer_specs[-1].submodules.self_attention):
        # A pipeline stage may hold MTP layers without a decoder layer; megatron-core 0.16.1 assumes at least one.
        layers = get_gpt_decoder_layer_specs(config, kind.engine, config.normalization, False)
        spec = TransformerBlockSubmodules(layer_specs=layers[-1:], layer_norm=spec.layer_norm)
        _replace_modules(spec, config, kind)
    mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=kind.engine, vp_stage=vp_stage)
    for layer in mtp_spec.layer_specs if mtp_spec is not None else ():
        layer.module = DetachedMTPLayer
        if not kind.engine:
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = local_norm(config)
    return mtp_spec


def finish_latent_attention(
    attention: MultiLatentAttention, config: TransformerConfig, norm_epsilon: float | None
) -> None:
    """Correct three properties of multi-latent attention in megatron-core 0.16.1 and TransformerEngine 2.11.

    - The latent norms (fused into the following projections by TransformerEngine) get the model's epsilon instead of
      their own.
    - The replicated down-projections get torch's initialization instead of config.init_method.
    - TransformerEngine marks the weights of replicated projections as tensor-parallel shards, so that the gradient norm
      would count them once per rank.
    """
    for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
        module = getattr(attention, name, None)
        if module is not None and hasattr(module, "eps") and norm_epsilon is not None:
            module.eps = norm_epsilon
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        projection = getattr(attention, name, None)
        if isinstance(projection, Linear):
            fill_parameter(projection.weight, config.init_method)
        elif projection is not None and projection.parallel_mode is None:  # TransformerEngine, mode "duplicated"
            projection.weight.tensor_model_parallel = False


def _replace_modules(spec: TransformerBlockSubmodules, config: TransformerConfig, kind: LayerKind) -> None:
    """Replace Megatron's routers and, without TransformerEngine, its local attention and norm, which support neither
    packed sequences nor sequence parallelism; TransformerEngine's attention where it does not support the rows."""
    use_policy_router(spec.layer_specs)
    if getattr(config, "qk_norm_over_heads", False):
        for layer in spec.layer_specs:
            use_head_norms(layer.submodules.self_attention.submodules, config)
    if config.attention_output_gate:
        gate_outputs(spec.layer_specs)
    if not kind.engine:
        spec.layer_norm = local_norm(config)
    if getattr(config, "post_norms", False):
        use_post_norms(spec.layer_specs, spec.layer_norm)
    for layer in spec.layer_specs:
        if not kind.engine:
            _adapt_layer(layer.submodules, config)
        elif kind.own_attention and not is_linear(layer.submodules.self_attention):
            layer.submodules.self_attention.submodules.core_attention = SDPACoreAttention


def _adapt_layer(parts: TransformerLayerSubmodules, config: TransformerConfig) -> None:
    """Replace the modules of a local layer."""
    norm = local_norm(config)
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.sharded_state_dict_keys_map = _transformer_engine_keys(parts, config)
    if is_linear(parts.self_attention):
        return
    attention = parts.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = norm
        # megatron-core 0.16.1: with a column-parallel down-projection, whose output is gathered, the gradient of
        # the shared part of the key contains only one rank's heads. With a replicated projection and sequence
        # parallelism the gradient is summed over ranks.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        if config.dsa_indexer_topk:
            use_chosen_attention(parts)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm


def _transformer_engine_keys(parts: TransformerLayerSubmodules, config: TransformerConfig) -> dict[str, str]:
    """Map key prefixes of a local layer's tensors to the keys of TransformerEngine's layer in a checkpoint.

    TransformerEngine fuses a norm into the following projection. With this map, checkpoints can be exchanged between
    hosts with and without TransformerEngine.
    """
    keys: dict[str, str] = {}
    if config.multi_latent_attention:
        for latent in ("q", "kv"):
            keys[f"self_attention.{latent}_layernorm."] = f"self_attention.linear_{latent}_up_proj.layer_norm_"
    else:
        projection = "in_proj" if is_linear(parts.self_attention) else "linear_qkv"
        keys["input_layernorm."] = f"self_attention.{projection}.layer_norm_"
    if not isinstance(getattr(parts.mlp, "submodules", None), MoESubmodules):
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return keys
