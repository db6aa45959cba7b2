"""Mixture-of-experts layers. DeepSeek and GLM have dense first layers, shared experts, sigmoid scores, correction bias.

Source: transformers models/deepseek_v3, models/glm4_moe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts import family
from model_converters.families.parts.arguments import TransformerArguments
from model_converters.families.parts.family import whole_row
from model_converters.families.parts.gated_mlp import PARTS, gated_rows, mlp_rows
from model_converters.families.parts.hf_config import HFConfig, flag, integer, number, require
from model_converters.families.parts.mtp import mtp_rows, num_mtp_layers
from model_converters.mapping.table import Row, Stored
from model_converters.mapping.transforms import Shape


@dataclass(frozen=True)
class ExpertNames:
    """HF names in a layer with experts, and the key of config.json with the experts' size.

    parts: gate, up and down projection.
    """

    block: str = "mlp"
    parts: tuple[str, str, str] = PARTS
    size_key: str = "moe_intermediate_size"


def expert_rows(
    hidden: int, intermediate: int, num_experts: int, layers: Sequence[int], *, names: ExpertNames = ExpertNames()
) -> list[Row]:
    """Return the rows of routers and routed experts."""
    mcore, hf = "decoder.layers.{l}.mlp.", f"model.layers.{{l}}.{names.block}."
    # Every rank computes the scores of all experts for its tokens.
    router = whole_row(f"{mcore}router.weight", f"{hf}gate.weight", (num_experts, hidden), layers)
    projections = gated_rows(
        (f"{mcore}experts.", f"{hf}experts.{{e}}."),
        hidden,
        intermediate,
        layers,
        split_by=names.size_key,
        parts=names.parts,
        num_experts=num_experts,
        stored=_stacked_in_memory(hidden, intermediate),
    )
    if router.hf[0] != _ROUTER_IN_MEMORY:
        router = replace(router, stored=(Stored(name=_ROUTER_IN_MEMORY, rows=num_experts),))
    return [router, *projections]


_BLOCK_IN_MEMORY = "model.layers.{l}.mlp."
"""Prefix of routers and experts in the models of transformers 5, for all families with experts."""
_ROUTER_IN_MEMORY = f"{_BLOCK_IN_MEMORY}gate.weight"


def _stacked_in_memory(hidden: int, intermediate: int) -> tuple[Stored, ...]:
    """Return the places of gate, up and down projection in the models of transformers 5, which
    save_pretrained(save_original_format=False) writes. Source: transformers integrations/moe.py."""
    gate = Stored(name=f"{_BLOCK_IN_MEMORY}experts.gate_up_proj", rows=2 * intermediate)
    down = Stored(name=f"{_BLOCK_IN_MEMORY}experts.down_proj", rows=hidden)
    return gate, replace(gate, start=intermediate), down


def gated_shared_rows(hidden: int, intermediate: int, layers: Sequence[int]) -> list[Row]:
    """Return the rows of a shared expert of size `intermediate`, whose output a sigmoid of each token scales."""
    mcore, hf = "decoder.layers.{l}.mlp.shared_experts.", "model.layers.{l}.mlp.shared_expert"
    split_by = "shared_expert_intermediate_size"
    return [
        *gated_rows((mcore, f"{hf}."), hidden, intermediate, layers, split_by=split_by),
        whole_row(f"{mcore}gate_weight", f"{hf}_gate.weight", (1, hidden), layers),
    ]


def softmax_experts(
    config: HFConfig,
    num_experts: int,
    intermediate: int,
    *,
    normalised: bool,
    topk_keys: tuple[str, ...] = ("num_experts_per_tok",),
) -> TransformerArguments:
    """Return the TransformerConfig arguments of experts of size `intermediate` with a softmax router.

    normalised: whether the weights of the chosen experts sum to 1.
    topk_keys: spellings of the number of experts per token in config.json.

    Raises: ConversionError for more experts per token than experts, and for one normalised expert per token.
    """
    topk = integer(config, *topk_keys)
    if topk > num_experts:
        raise ConversionError(f"config.json: {topk_keys[0]} {topk} exceeds the {num_experts} experts")
    if normalised and topk == 1:
        raise ConversionError(
            f"config.json: {topk_keys[0]} 1 with normalised weights (norm_topk_prob) makes every routing weight 1; "
            "megatron rejects it"
        )
    return {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": intermediate,
        "moe_router_topk": topk,
        "moe_router_score_function": "softmax",
        # A softmax over the chosen logits equals the full softmax, renormalised over the chosen experts.
        "moe_router_pre_softmax": not normalised,
    }


def corrected(experts: TransformerArguments, score_function: str) -> TransformerArguments:
    """Return the arguments of `experts` that are chosen by score plus a correction bias. Their weights are the scores
    without bias, normalised over the chosen experts."""
    return {
        **experts,
        "moe_router_score_function": score_function,
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
    }


def correction_row(hf: str, shape: Shape, layers: Sequence[int]) -> Row:
    """Return the row of the routers' correction biases, named `hf` after the prefix of a layer.

    The bias affects the choice of experts and not their weights. It is float32 for every model dtype: its updates are
    smaller than the resolution of bfloat16.
    """
    names = "decoder.layers.{l}.mlp.router.expert_bias", f"model.layers.{{l}}.{hf}"
    return replace(whole_row(*names, shape, layers), dtype=torch.float32)


def expert_sizes(config: HFConfig) -> TransformerArguments:
    """Read the sizes of experts, as arguments of TransformerConfig. All shared experts form one MLP.

    Raises: ConversionError.
    """
    intermediate = integer(config, "moe_intermediate_size")
    shared = intermediate * integer(config, "n_shared_experts")
    # transformers accepts a second spelling in each of these families; `integer` rejects spellings that differ.
    num_experts = integer(config, "n_routed_experts", "num_local_experts", "num_experts")
    topk = integer(config, "num_experts_per_tok")
    if topk > num_experts:
        raise ConversionError(f"config.json: num_experts_per_tok {topk} exceeds n_routed_experts {num_experts}")
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": intermediate,
        "moe_shared_expert_intermediate_size": shared,
    }


def is_sparse(config: HFConfig, layer: int) -> bool:
    """Return whether a layer has experts: every moe_layer_freq-th layer, except the first first_k_dense_replace."""
    first = integer(config, "first_k_dense_replace", minimum=0)
    return layer >= first and layer % integer(config, "moe_layer_freq", default=1) == 0


def sparse_pattern(config: HFConfig) -> list[bool]:
    """Return is_sparse for every decoder layer."""
    return [is_sparse(config, layer) for layer in range(integer(config, "num_hidden_layers"))]


def mtp_pattern(config: HFConfig) -> list[bool]:
    """Return sparse_pattern of a multi-token-prediction layer, which Megatron builds like the last decoder layer.

    Raises: ConversionError if the configuration requires a different layer.
    """
    last = integer(config, "num_hidden_layers") - 1
    for layer in range(last + 1, last + 1 + num_mtp_layers(config)):
        if is_sparse(config, layer) != is_sparse(config, last):
            raise ConversionError(
                "config.json: num_nextn_predict_layers: by first_k_dense_replace and moe_layer_freq, only one of layer "
                f"{layer} and the last decoder layer has experts, which is not supported; set it to 0"
            )
    return [is_sparse(config, last)]


def rows_with_mtp(layer_rows: Callable[[HFConfig, list[bool]], list[Row]], config: HFConfig) -> list[Row]:
    """Return the table of a model with multi-token prediction.

    layer_rows: function from config.json and the pattern (see mlp_and_expert_rows) to the rows of decoder layers.
    """
    return [
        *family.embedding_rows(config),
        *layer_rows(config, sparse_pattern(config)),
        *mtp_rows(config, layer_rows(config, mtp_pattern(config))),
    ]


def mlp_and_expert_rows(config: HFConfig, pattern: Sequence[bool], *, corrected: bool = False) -> list[Row]:
    """Return the rows of dense MLPs, routers, routed and shared experts.

    pattern: for every layer whether it has experts.
    corrected: whether routers have an e_score_correction_bias.
    """
    sizes, hidden = expert_sizes(config), integer(config, "hidden_size")
    num_experts, shared = sizes["num_moe_experts"], sizes["moe_shared_expert_intermediate_size"]
    rows = mlp_rows(config, [layer for layer, has_experts in enumerate(pattern) if not has_experts])
    sparse = [layer for layer, has_experts in enumerate(pattern) if has_experts]
    if sparse:
        prefixes = ("decoder.layers.{l}.mlp.shared_experts.", "model.layers.{l}.mlp.shared_experts.")
        split_by = "n_shared_experts * moe_intermediate_size"
        rows += expert_rows(hidden, sizes["moe_ffn_hidden_size"], num_experts, sparse)
        # The shared experts process every token: one MLP, divided like a dense MLP.
        rows += gated_rows(prefixes, hidden, shared, sparse, split_by=split_by)
    if sparse and corrected:
        rows.append(correction_row("mlp.gate.e_score_correction_bias", (num_experts,), sparse))
    return rows


def sparse_arguments(config: HFConfig, routing: TransformerArguments) -> TransformerArguments:
    """Return the TransformerConfig arguments of experts and of the family's `routing`; empty without experts."""
    sizes, pattern = expert_sizes(config), sparse_pattern(config)
    if not any(pattern):
        return {}
    return {**sizes, "moe_layer_freq": [int(sparse) for sparse in pattern], **routing}


def sigmoid_routing(config: HFConfig) -> TransformerArguments:
    """Return the arguments of sigmoid routing.

    Experts are chosen by score plus correction bias. Their weights are the scores without bias, normalised over the
    chosen experts.

    Raises: ConversionError naming a field for which Megatron computes something else.
    """
    require(config, "scoring_func", "sigmoid", None, reason="this family's scores are sigmoids")
    require(config, "topk_method", "noaux_tc", None, reason="its experts are chosen with a correction bias")
    normalised, topk = flag(config, "norm_topk_prob"), expert_sizes(config)["moe_router_topk"]
    # Megatron has no switch for this normalisation: it depends on the number of chosen experts.
    if normalised != (topk > 1):
        raise ConversionError(
            f"config.json: norm_topk_prob {normalised} with num_experts_per_tok {topk} is not supported: "
            "megatron always normalises the scores of several experts, and never the score of a single one"
        )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": number(config, "routed_scaling_factor", positive=True),
        # DeepSeek-V3 and GLM-4 rank a group by the sum of its two best scores.
        **group_limits(config, best_of_group=2),
    }


def group_limits(config: HFConfig, *, best_of_group: int) -> TransformerArguments:
    """Return the arguments of group-limited routing.

    A token chooses topk_group of n_group groups by the sum of the `best_of_group` best scores of each group, then its
    experts within these groups.

    Raises: ConversionError naming the fields if Megatron would sum another number of scores.
    """
    sizes, groups, chosen = expert_sizes(config), integer(config, "n_group"), integer(config, "topk_group")
    num_experts, topk = sizes["num_moe_experts"], sizes["moe_router_topk"]
    if chosen > groups:
        raise ConversionError(f"config.json: topk_group {chosen} exceeds n_group {groups}")
    if num_experts % groups:
        raise ConversionError(f"config.json: n_routed_experts {num_experts} is not a multiple of n_group {groups}")
    if groups == chosen:  # all groups are chosen: no limit
        return {}
    if topk // chosen != best_of_group:
        raise ConversionError(
            f"config.json: topk_group {chosen} with num_experts_per_tok {topk} is not supported: this family "
            f"ranks a group by its best {best_of_group}, megatron by its best num_experts_per_tok // topk_group = "
            f"{topk // chosen}"
        )
    per_group = num_experts // groups
    if per_group < best_of_group or per_group * chosen < topk:
        raise ConversionError(
            f"config.json: n_group {groups} gives {per_group} experts per group, too few for topk_group {chosen} and "
            f"num_experts_per_tok {topk}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
