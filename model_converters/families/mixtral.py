"""Mixtral: attention of Llama, routed experts in every layer. Source: transformers models/mixtral.

Tensor names follow the hub's checkpoints, which transformers 5 writes too: w1 is gate, w3 is up, w2 is down; router and
experts are in block_sparse_moe. router_jitter_noise is not applied: it adds noise to the router's input in training
only, but an update must compute the probabilities that the engine sampled with.
"""

from __future__ import annotations

from model_converters.errors import ConversionError
from model_converters.families.parts import experts, family
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import HFConfig, integer
from model_converters.mapping.table import Row

_NAMES = experts.ExpertNames(block="block_sparse_moe", parts=("w1", "w3", "w2"), size_key="intermediate_size")


def _attention(config: HFConfig) -> TransformerArguments:
    # Absent means null, as in transformers' MixtralConfig.
    if config.get("sliding_window") is not None:
        raise ConversionError(
            f"config.json: sliding_window {config['sliding_window']} is not supported, only null (full attention)"
        )
    return family.grouped_attention(config)


def num_experts(config: HFConfig) -> int:
    """Return the number of experts. If both spellings are present, transformers uses the second."""
    return integer(config, "num_local_experts", "num_experts")


def rows(config: HFConfig, attention: TransformerArguments) -> list[Row]:
    """Return the weight table of a model with experts in every layer, under Mixtral's names."""
    layers = range(integer(config, "num_hidden_layers"))
    hidden, intermediate = attention["hidden_size"], integer(config, "intermediate_size")
    return [
        *family.embedding_rows(config),
        *family.attention_rows(attention, layers),
        *experts.expert_rows(hidden, intermediate, num_experts(config), layers, names=_NAMES),
    ]


def _rows(config: HFConfig) -> list[Row]:
    return rows(config, _attention(config))


def _model_arguments(config: HFConfig) -> ModelArguments:
    transformer = family.decoder_arguments(config, _attention(config))
    intermediate = integer(config, "intermediate_size")
    transformer |= experts.softmax_experts(config, num_experts(config), intermediate, normalised=True)
    return family.model_arguments(config, transformer)


MIXTRAL = family.Family(
    "mixtral",
    _rows,
    _model_arguments,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    architecture="MixtralForCausalLM",
    unread_by_engines=dict.fromkeys(("head_dim", "rope_parameters", "tie_word_embeddings"), family.SGLANG),
    own_fields=frozenset({"sliding_window"}),
    description=family.Description(
        models="Mixtral 8x7B, 8x22B",
        covers="grouped-query attention, softmax over the chosen experts; router_jitter_noise is not applied",
        refused={
            "sliding_window": 4096,
            "num_experts_per_tok": 1,
            **family.REFUSED_BY_ATTENTION,
        },
        vllm_cpu="runs",
    ),
)
