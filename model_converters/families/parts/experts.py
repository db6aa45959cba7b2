"""Mixture-of-experts layers as DeepSeek and GLM build them: dense layers first, shared experts, sigmoid scores with a
correction bias. Source: transformers models/deepseek_v3, models/glm4_moe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts.family import expert_rows, gated_rows, mlp_rows
from model_converters.families.parts.hf_config import HFConfig, flag, integer, number, require
from model_converters.families.parts.mtp import num_mtp_layers
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import Same


@dataclass(frozen=True)
class ExpertSizes:
    """Units: experts; elements. `shared_intermediate` is that of all shared experts together, which are one MLP."""

    hidden: int
    dense_intermediate: int
    intermediate: int
    shared_intermediate: int
    num_experts: int
    topk: int


def expert_sizes(config: HFConfig) -> ExpertSizes:
    """Raises: ConversionError."""
    intermediate = integer(config, "moe_intermediate_size")
    sizes = ExpertSizes(
        hidden=integer(config, "hidden_size"),
        dense_intermediate=integer(config, "intermediate_size"),
        intermediate=intermediate,
        shared_intermediate=intermediate * integer(config, "n_shared_experts"),
        # transformers knows a second spelling in each of these families, and takes it where both are there.
        num_experts=integer(config, "n_routed_experts", "num_local_experts", "num_experts"),
        topk=integer(config, "num_experts_per_tok"),
    )
    if sizes.topk > sizes.num_experts:
        raise ConversionError(
            f"config.json: num_experts_per_tok {sizes.topk} exceeds n_routed_experts {sizes.num_experts}"
        )
    return sizes


def is_sparse(config: HFConfig, layer: int) -> bool:
    """Whether the layer has experts: not the first first_k_dense_replace, then every moe_layer_freq-th."""
    first = integer(config, "first_k_dense_replace", minimum=0)
    return layer >= first and layer % integer(config, "moe_layer_freq", default=1) == 0


def sparse_pattern(config: HFConfig) -> list[bool]:
    """is_sparse of every layer of the decoder."""
    return [is_sparse(config, layer) for layer in range(integer(config, "num_hidden_layers"))]


def mtp_pattern(config: HFConfig) -> list[bool]:
    """sparse_pattern of one multi-token-prediction layer: megatron builds it like the last layer of the decoder.

    Raises: ConversionError when the configuration has it otherwise.
    """
    last = integer(config, "num_hidden_layers") - 1
    for layer in range(last + 1, last + 1 + num_mtp_layers(config)):
        if is_sparse(config, layer) != is_sparse(config, last):
            raise ConversionError(
                f"config.json: num_nextn_predict_layers: by first_k_dense_replace and moe_layer_freq layer {layer} and "
                f"the last layer of the decoder differ in having experts, which is not supported; set it to 0"
            )
    return [is_sparse(config, last)]


def mlp_and_expert_rows(sizes: ExpertSizes, pattern: Sequence[bool], *, corrected: bool = False) -> list[Row]:
    """Dense MLPs, routers, routed and shared experts; `pattern` says of every layer whether it has experts.

    `corrected`: routers have an e_score_correction_bias.
    """
    dense = [layer for layer, has_experts in enumerate(pattern) if not has_experts]
    sparse = [layer for layer, has_experts in enumerate(pattern) if has_experts]
    rows: list[Row] = []
    if dense:
        rows += mlp_rows(sizes.hidden, sizes.dense_intermediate, dense)
    if sparse:
        rows += expert_rows(sizes.hidden, sizes.intermediate, sizes.num_experts, sparse)
        rows += shared_expert_rows(sizes.hidden, sizes.shared_intermediate, sparse)
    if sparse and corrected:
        rows.append(correction_bias_row(sizes.num_experts, sparse))
    return rows


def shared_expert_rows(hidden: int, intermediate: int, layers: Sequence[int]) -> list[Row]:
    """The experts that every token visits: one MLP, divided like a dense one."""
    prefixes = ("decoder.layers.{l}.mlp.shared_experts.", "model.layers.{l}.mlp.shared_experts.")
    split_by = "n_shared_experts * moe_intermediate_size"
    return gated_rows(prefixes, "", hidden, intermediate, axis="tp", split_by=split_by, layers=tuple(layers))


def correction_bias_row(num_experts: int, layers: Sequence[int]) -> Row:
    """Added to the scores for choosing experts, not for weighting them. float32, whatever the model's dtype: it is
    moved in steps that bfloat16 cannot hold."""
    return Row(
        mcore="decoder.layers.{l}.mlp.router.expert_bias",
        hf=("model.layers.{l}.mlp.gate.e_score_correction_bias",),
        shapes=((num_experts,),),
        transform=Same(),
        dtype=torch.float32,
        layers=tuple(layers),
    )


def sparse_arguments(sizes: ExpertSizes, pattern: Sequence[bool], routing: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig arguments of the experts; `routing` is the family's. Empty when no layer has experts."""
    if not any(pattern):
        return {}
    return {
        "num_moe_experts": sizes.num_experts,
        "moe_router_topk": sizes.topk,
        "moe_ffn_hidden_size": sizes.intermediate,
        "moe_shared_expert_intermediate_size": sizes.shared_intermediate,
        "moe_layer_freq": [int(sparse) for sparse in pattern],
        **routing,
    }


def scaling_factor(config: HFConfig) -> float:
    """routed_scaling_factor."""
    return number(config, "routed_scaling_factor", positive=True)


def sigmoid_routing(config: HFConfig, sizes: ExpertSizes) -> dict[str, Any]:
    """Sigmoid scores, chosen with the correction bias, weighted without it and normalised over the chosen.

    Raises: ConversionError for what megatron computes otherwise, by name.
    """
    require(config, "scoring_func", "sigmoid", None, reason="this family's scores are sigmoids")
    require(config, "topk_method", "noaux_tc", None, reason="its experts are chosen with a correction bias")
    normalised = flag(config, "norm_topk_prob")
    if normalised != (sizes.topk > 1):
        raise ConversionError(
            f"config.json: norm_topk_prob {normalised} with num_experts_per_tok {sizes.topk} is not supported: "
            "megatron normalises the scores of several experts, and never that of one"
        )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": scaling_factor(config),
        **group_limits(config, sizes, best_of_group=2),
    }


def group_limits(config: HFConfig, sizes: ExpertSizes, *, best_of_group: int) -> dict[str, Any]:
    """Tokens choose topk_group of n_group groups by the sum of the `best_of_group` best scores in a group, then their
    experts within these.

    Raises: ConversionError where megatron would sum another number of scores, by name.
    """
    groups, chosen = integer(config, "n_group"), integer(config, "topk_group")
    if chosen > groups:
        raise ConversionError(f"config.json: topk_group {chosen} exceeds n_group {groups}")
    if sizes.num_experts % groups:
        raise ConversionError(
            f"config.json: n_routed_experts {sizes.num_experts} is not a multiple of n_group {groups}"
        )
    if groups == chosen:
        return {}
    if sizes.topk // chosen != best_of_group:
        raise ConversionError(
            f"config.json: topk_group {chosen} with num_experts_per_tok {sizes.topk} is not supported: this family "
            f"ranks a group by its best {best_of_group}, megatron by its best num_experts_per_tok // topk_group = "
            f"{sizes.topk // chosen}"
        )
    per_group = sizes.num_experts // groups
    if per_group < best_of_group or per_group * chosen < sizes.topk:
        raise ConversionError(
            f"config.json: n_group {groups} leaves {per_group} experts in a group, too few for topk_group {chosen} "
            f"and num_experts_per_tok {sizes.topk}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
