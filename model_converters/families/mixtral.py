"""Mixtral: Llama's attention, routed experts in every layer. Source: transformers models/mixtral.

Names are those of the hub, which transformers 5 writes too: w1 is gate, w3 is up, w2 is down, router and experts lie in
block_sparse_moe. router_jitter_noise is not applied: it is noise on the router's input in training mode alone, and an
update must see the probabilities that the engine sampled with.
"""

from __future__ import annotations

from model_converters.description import REFUSED_BY_ATTENTION, REFUSED_ROTATIONS, Description
from model_converters.errors import ConversionError
from model_converters.family import (
    AttentionSizes,
    ExpertNames,
    Family,
    ModelArguments,
    attention_rows,
    attention_sizes,
    decoder_arguments,
    embedding_rows,
    expert_rows,
    model_arguments,
    softmax_routing,
)
from model_converters.hf_config import HFConfig, integer
from model_converters.table import Row

_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2", size_key="intermediate_size")


def _sizes(config: HFConfig) -> AttentionSizes:
    if config.get("sliding_window") is not None:
        raise ConversionError(
            f"config.json: sliding_window {config['sliding_window']} is not supported, only null (full attention)"
        )
    return attention_sizes(config)


def _rows(config: HFConfig) -> list[Row]:
    sizes = _sizes(config)
    layers = range(integer(config, "num_hidden_layers"))
    intermediate, num_experts = integer(config, "intermediate_size"), integer(config, "num_local_experts")
    return [
        *embedding_rows(config, sizes.hidden),
        *attention_rows(sizes, layers),
        *expert_rows(sizes.hidden, intermediate, num_experts, layers, names=_NAMES),
    ]


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer = dict(
        decoder_arguments(config, _sizes(config)),
        add_qkv_bias=False,
        qk_layernorm=False,
        num_moe_experts=integer(config, "num_local_experts"),
        moe_ffn_hidden_size=integer(config, "intermediate_size"),
        # Where config.json has none, MixtralConfig's own.
        layernorm_epsilon=float(config.get("rms_norm_eps", 1e-5)),
        **softmax_routing(config, normalised=True),
    )
    return model_arguments(config, transformer)


MIXTRAL = Family(
    "mixtral",
    rows=_rows,
    model_arguments=_model_arguments,
    description=Description(
        models="Mixtral 8x7B, 8x22B",
        covers="grouped-query attention, softmax over the chosen experts; router_jitter_noise is not applied",
        refused={"sliding_window": 4096, "num_experts_per_tok": 1, **REFUSED_BY_ATTENTION, **REFUSED_ROTATIONS},
        vllm_cpu="runs",
    ),
)
