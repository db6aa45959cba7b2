"""Definition of a model family, and rows and arguments shared by families with grouped-query attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model_converters.errors import ConversionError
from model_converters.families.parts.description import Description
from model_converters.families.parts.hf_config import (
    HFConfig,
    flag,
    integer,
    number,
    refuse_sliding_window,
    refuse_unsupported,
)
from model_converters.families.parts.rotary import RotarySettings, rotary
from model_converters.mapping.table import FINAL_NORM, Row
from model_converters.mapping.transforms import GateUp, GroupedQKV, Same, Vocabulary


@dataclass(frozen=True)
class ModelArguments:
    """Arguments of a GPTModel.

    transformer: keyword arguments of Megatron's TransformerConfig as plain values. activation_func is a name ("silu");
    mcore_rl.megatron replaces it by the function.
    mtp_num_layers: number of multi-token-prediction layers.
    latent_norm_epsilon: epsilon of the two norms inside multi-head latent attention, for which Megatron would use the
    model's epsilon; None without such norms.
    """

    transformer: dict[str, Any]
    vocab_size: int
    max_position_embeddings: int
    rotary: RotarySettings
    tied_embeddings: bool
    mtp_num_layers: int = 0
    latent_norm_epsilon: float | None = None


VLLM, SGLANG = frozenset({"vllm"}), frozenset({"sglang"})
"""Values of Family.unread_by_engines."""


@dataclass(frozen=True)
class Family:
    """One model_type with its weight table (`rows`) and `model_arguments`, both functions of config.json.

    engine_fields: fields that inference engines need in config.json and that transformers omits or writes as null.
    transformers_type: model_type under which transformers registers the family, if different.
    architecture: class name in transformers, by which inference engines select their implementation.
    own_fields: fields of parts.engine_fields.NEUTRAL that transformers and engines interpret in the same way for this
    family, so they are not overridden.
    absent_for_engines: fields whose mere presence, even as null, changes an engine's model.
    unread_by_engines: field -> engines that ignore it for this family.
    engine_values: function from config.json to the fields that engines must read with another value.

    Raises (rows and model_arguments): ConversionError for a configuration that the family cannot represent.
    """

    model_type: str
    rows: Callable[[HFConfig], list[Row]]
    model_arguments: Callable[[HFConfig], ModelArguments]
    description: Description
    engine_fields: Mapping[str, Any] = field(default_factory=dict)
    transformers_type: str = ""
    architecture: str = field(kw_only=True)
    own_fields: frozenset[str] = frozenset()
    absent_for_engines: frozenset[str] = frozenset()
    unread_by_engines: Mapping[str, frozenset[str]] = field(default_factory=dict)
    engine_values: Callable[[HFConfig], dict[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of grouped-query attention. Units: heads, groups, elements."""

    hidden: int
    num_heads: int
    num_groups: int
    head_dim: int


def attention_sizes(config: HFConfig, *, bias_of_qkv_only: bool = False) -> AttentionSizes:
    """Read the sizes of grouped-query attention and reject unsupported attention settings.

    bias_of_qkv_only: attention_bias of this family applies to q, k and v but not to o_proj.
    """
    refuse_unsupported(config)
    refuse_sliding_window(config)
    if flag(config, "attention_bias") and not bias_of_qkv_only:
        raise ConversionError("config.json: attention_bias is not supported: it also adds a bias to o_proj")
    num_heads = integer(config, "num_attention_heads")
    num_groups = integer(config, "num_key_value_heads", default=num_heads)
    hidden = integer(config, "hidden_size")
    if num_heads % num_groups:
        raise ConversionError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_groups}"
        )
    head_dim = integer(config, "head_dim", default=hidden // num_heads)
    if head_dim % 2:
        raise ConversionError(f"config.json: head_dim {head_dim} is odd, but rotation pairs the elements of a head")
    return AttentionSizes(hidden=hidden, num_heads=num_heads, num_groups=num_groups, head_dim=head_dim)


def embedding_rows(config: HFConfig, hidden: int) -> list[Row]:
    """Return the rows of embedding, final norm and head. A tied head repeats the embedding."""
    vocab = integer(config, "vocab_size")
    tied = flag(config, "tie_word_embeddings")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    vocabulary: dict[str, Any] = {
        "shapes": ((vocab, hidden),),
        "transform": Vocabulary(),
        "axis": "tp",
        "split_by": "vocab_size",
    }
    return [
        Row(
            mcore="embedding.word_embeddings.weight",
            hf=(embedding,),
            place="embedding",
            # Some tied checkpoints store the head as well; its values must then equal the embedding.
            redundant=(head,) if tied else (),
            **vocabulary,
        ),
        norm_row(FINAL_NORM, "model.norm.weight", hidden, place="head"),
        Row(
            mcore="output_layer.weight",
            hf=(embedding if tied else head,),
            place="head",
            copy_of_embedding=tied,
            **vocabulary,
        ),
    ]


def norm_row(mcore: str, hf: str, size: int, **place: Any) -> Row:
    """Return the row of a vector that every rank of the stage holds."""
    return Row(mcore=mcore, hf=(hf,), shapes=((size,),), transform=Same(), **place)


def attention_rows(sizes: AttentionSizes, layers: Sequence[int]) -> list[Row]:
    """Return the rows of the norms before attention and MLP, fused q, k, v, and the output projection."""
    mcore, hf = "decoder.layers.{l}.", "model.layers.{l}."
    q_rows, kv_rows = sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.head_dim
    return [
        norm_row(f"{mcore}input_layernorm.weight", f"{hf}input_layernorm.weight", sizes.hidden, layers=tuple(layers)),
        Row(
            mcore=f"{mcore}self_attention.linear_qkv.weight",
            hf=tuple(f"{hf}self_attn.{part}_proj.weight" for part in "qkv"),
            shapes=((q_rows, sizes.hidden), (kv_rows, sizes.hidden), (kv_rows, sizes.hidden)),
            transform=GroupedQKV(sizes.num_groups),
            axis="tp",
            split_by="num_key_value_heads",
            layers=tuple(layers),
            fp8=True,
        ),
        Row(
            mcore=f"{mcore}self_attention.linear_proj.weight",
            hf=(f"{hf}self_attn.o_proj.weight",),
            shapes=((sizes.hidden, q_rows),),
            transform=Same(),
            axis="tp",
            dim=1,
            split_by="num_attention_heads * head_dim",
            layers=tuple(layers),
            fp8=True,
        ),
        norm_row(
            f"{mcore}pre_mlp_layernorm.weight",
            f"{hf}post_attention_layernorm.weight",
            sizes.hidden,
            layers=tuple(layers),
        ),
    ]


def qkv_bias_row(sizes: AttentionSizes, layers: Sequence[int]) -> Row:
    """Return the row of the biases of q, k and v, fused like their weights."""
    q_rows, kv_rows = sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.head_dim
    return Row(
        mcore="decoder.layers.{l}.self_attention.linear_qkv.bias",
        hf=tuple(f"model.layers.{{l}}.self_attn.{part}_proj.bias" for part in "qkv"),
        shapes=((q_rows,), (kv_rows,), (kv_rows,)),
        transform=GroupedQKV(sizes.num_groups),
        axis="tp",
        split_by="num_key_value_heads",
        layers=tuple(layers),
    )


def qk_norm_rows(head_dim: int, layers: Sequence[int]) -> list[Row]:
    """Return the rows of the RMS norms of query and key heads."""
    mcore, hf = "decoder.layers.{l}.self_attention.", "model.layers.{l}.self_attn."
    return [
        norm_row(f"{mcore}{part}_layernorm.weight", f"{hf}{part}_norm.weight", head_dim, layers=tuple(layers))
        for part in "qk"
    ]


def mlp_rows(hidden: int, intermediate: int, layers: Sequence[int]) -> list[Row]:
    """Return the rows of a dense gated MLP."""
    prefixes = ("decoder.layers.{l}.mlp.", "model.layers.{l}.mlp.")
    return gated_rows(prefixes, "", hidden, intermediate, axis="tp", split_by="intermediate_size", layers=tuple(layers))


@dataclass(frozen=True)
class ExpertNames:
    """HF names in a layer with experts, and the key of config.json with the experts' size."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    size_key: str = "moe_intermediate_size"


def expert_rows(
    hidden: int, intermediate: int, num_experts: int, layers: Sequence[int], *, names: ExpertNames = ExpertNames()
) -> list[Row]:
    """Return the rows of routers and routed experts."""
    mcore, hf = "decoder.layers.{l}.mlp.", f"model.layers.{{l}}.{names.block}."
    router = Row(
        mcore=f"{mcore}router.weight",
        hf=(f"{hf}gate.weight",),
        shapes=((num_experts, hidden),),
        transform=Same(),
        layers=tuple(layers),
    )
    prefixes = (f"{mcore}experts.", f"{hf}experts.{{e}}.")
    sharing: dict[str, Any] = {"axis": "etp", "split_by": names.size_key, "num_experts": num_experts}
    parts = (names.gate, names.up, names.down)
    return [router, *gated_rows(prefixes, "{e}", hidden, intermediate, parts, layers=tuple(layers), **sharing)]


def gated_rows(
    prefixes: tuple[str, str],
    suffix: str,
    hidden: int,
    intermediate: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    **sharing: Any,
) -> list[Row]:
    """Return the rows of a gated MLP under (mcore, HF) prefixes. `sharing`: further arguments of Row (axis, layers)."""
    mcore, hf = prefixes
    up, down = (intermediate, hidden), (hidden, intermediate)
    return [
        Row(
            mcore=f"{mcore}linear_fc1.weight{suffix}",
            hf=tuple(f"{hf}{part}.weight" for part in parts[:2]),
            shapes=(up, up),
            transform=GateUp(),
            fp8=True,
            **sharing,
        ),
        Row(
            mcore=f"{mcore}linear_fc2.weight{suffix}",
            hf=(f"{hf}{parts[2]}.weight",),
            shapes=(down,),
            transform=Same(),
            dim=1,
            fp8=True,
            **sharing,
        ),
    ]


def decoder_arguments(config: HFConfig, sizes: AttentionSizes) -> dict[str, Any]:
    """Return the TransformerConfig arguments of a pre-norm decoder with RMS norms and gated SiLU."""
    return {
        "num_layers": integer(config, "num_hidden_layers"),
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": integer(config, "intermediate_size"),
        "num_attention_heads": sizes.num_heads,
        "num_query_groups": sizes.num_groups,
        "kv_channels": sizes.head_dim,
        "layernorm_epsilon": number(config, "rms_norm_eps", 1e-6, positive=True),
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": number(config, "attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": number(config, "initializer_range", 0.02, positive=True),
    }


def softmax_routing(config: HFConfig, num_experts: int, *, normalised: bool) -> dict[str, Any]:
    """Return the TransformerConfig arguments of a softmax router.

    normalised: whether the weights of the chosen experts sum to 1.

    Raises: ConversionError for more experts per token than experts, and for one normalised expert per token.
    """
    topk = integer(config, "num_experts_per_tok")
    if topk > num_experts:
        raise ConversionError(f"config.json: num_experts_per_tok {topk} exceeds the {num_experts} experts")
    if normalised and topk == 1:
        raise ConversionError(
            "config.json: num_experts_per_tok 1 with normalised weights (norm_topk_prob) makes every routing weight 1; "
            "megatron rejects it"
        )
    return {
        "moe_router_topk": topk,
        "moe_router_score_function": "softmax",
        # A softmax over the chosen logits equals the full softmax, renormalised over the chosen experts.
        "moe_router_pre_softmax": not normalised,
    }


def model_arguments(
    config: HFConfig,
    transformer: dict[str, Any],
    *,
    rope_types: tuple[str, ...] = ("default",),
    partial_rotation: bool = False,
) -> ModelArguments:
    """Combine TransformerConfig arguments with the other arguments of GPTModel.

    rope_types: rope types that the family supports.
    partial_rotation: see `partial` of rotary.
    """
    return ModelArguments(
        transformer=transformer,
        vocab_size=integer(config, "vocab_size"),
        max_position_embeddings=integer(config, "max_position_embeddings"),
        rotary=rotary(config, known=rope_types, partial=partial_rotation),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )
