"""Tables and arguments of models with hybrid attention (delta_net.py): dense MLPs, or routed experts with a gated
shared expert, and at most one multi-token-prediction layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.families.parts import experts, family, gated_mlp
from model_converters.families.parts.delta_net import hybrid_attention, hybrid_rows, linear_layers
from model_converters.families.parts.hf_config import HFConfig, integer
from model_converters.families.parts.mtp import SEPARATE, mtp_rows, num_mtp_layers
from model_converters.families.parts.vision import without_sections
from model_converters.mapping.table import Row

SHARED_EXPERT = frozenset({"shared_expert_intermediate_size"})
SECTIONS = frozenset({"mrope_section"})
"""Parts of Family.own_fields: fields that transformers uses too, of models with experts and with Qwen3.5's rotation."""


def hybrid_table(config: HFConfig, sparse: Sequence[bool], *, separate: bool) -> list[Row]:
    """Return the weight table.

    sparse: for every decoder layer whether it has experts.
    separate: see delta_net.hybrid_rows.

    Raises: ConversionError.
    """
    linear = linear_layers(config)
    _check_mtp(config)
    return [
        *family.embedding_rows(config),
        *hybrid_rows(config, linear, separate=separate),
        *_mlp_rows(config, sparse),
        # The layer for multi-token prediction has attention, and the MLP of the last decoder layer (megatron/model).
        *mtp_rows(
            config, [*hybrid_rows(config, [False], separate=separate), *_mlp_rows(config, sparse[-1:])], SEPARATE
        ),
    ]


def hybrid_arguments(config: HFConfig, sparse: Sequence[bool], *, normalised: bool = True) -> family.ModelArguments:
    """Return the arguments of the model.

    normalised: whether the weights of the chosen experts sum to 1.

    Raises: ConversionError.
    """
    attention = hybrid_attention(config)
    _check_mtp(config)
    routing: family.TransformerArguments = {}
    if any(sparse):
        intermediate = integer(config, "moe_intermediate_size")
        routing |= experts.softmax_experts(config, integer(config, "num_experts"), intermediate, normalised=normalised)
        routing["moe_layer_freq"] = [int(is_sparse) for is_sparse in sparse]
        routing["moe_shared_expert_intermediate_size"] = integer(config, "shared_expert_intermediate_size")
        routing["moe_shared_expert_gate"] = True
        if all(sparse):  # config.json of Qwen3.5 has no size of dense layers
            config = {"intermediate_size": intermediate, **config}
    transformer: family.TransformerArguments = {**family.decoder_arguments(config, attention), **routing}
    # The three positions of a text token are equal.
    arguments = family.model_arguments(without_sections(config), transformer, partial_rotation=True)
    return replace(arguments, mtp_num_layers=num_mtp_layers(config))


def _mlp_rows(config: HFConfig, sparse: Sequence[bool]) -> list[Row]:
    rows = gated_mlp.mlp_rows(config, [layer for layer, is_sparse in enumerate(sparse) if not is_sparse])
    layers = [layer for layer, is_sparse in enumerate(sparse) if is_sparse]
    if layers:
        hidden, intermediate = integer(config, "hidden_size"), integer(config, "moe_intermediate_size")
        rows += experts.expert_rows(hidden, intermediate, integer(config, "num_experts"), layers)
        rows += experts.gated_shared_rows(hidden, integer(config, "shared_expert_intermediate_size"), layers)
    return rows


def _check_mtp(config: HFConfig) -> None:
    count = num_mtp_layers(config)
    if count > 1:
        raise ConversionError(
            f"config.json: {count} multi-token-prediction layers (mtp_num_hidden_layers, num_nextn_predict_layers) are "
            "not supported, only 1"
        )
