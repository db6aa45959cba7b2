"""Definition of a model family, and rows and arguments shared by families with grouped-query attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from model_converters.errors import ConversionError
from model_converters.families.parts import gated_mlp, hf_config
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import HFConfig, flag, integer, number
from model_converters.families.parts.rotary import ROPE_TYPES, rotary
from model_converters.mapping.table import FINAL_NORM, Place, Row
from model_converters.mapping.transforms import GroupedQKV, Heads, KeyValueHeads, Same, Shape, Vocabulary

REFUSED_BY_ALL: dict[str, object] = {"dual_chunk_attention_config": {"chunk_size": 262144}, "is_causal": False}
"""Fields that hf_config.refuse_unsupported rejects for every family."""

REFUSED_ROTATIONS: dict[str, object] = {
    "rope_scaling": {"rope_type": "proportional", "factor": 2.0},
    "partial_rotary_factor": 0.5,
}
"""Fields that model_arguments rejects, with an example value."""

REFUSED_BY_ATTENTION: dict[str, object] = {
    **REFUSED_BY_ALL,
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_types": ["sliding_attention"],
    "quantization_config": {"quant_method": "gptq"},
    **REFUSED_ROTATIONS,
}
"""Fields that grouped_attention and model_arguments reject, with an example value."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """One row of the catalogue of families.

    models: names of well-known models.
    covers: supported features of the architecture.
    refused: fields of config.json that are rejected, each with a rejected value (tests set it and expect the error).
    vllm_cpu: "runs" if a test syncs the family into vLLM on CPU, else the error that vLLM raises.
    """

    models: str
    covers: str
    refused: Mapping[str, object]
    vllm_cpu: str = "not tried"


VLLM, SGLANG = frozenset({"vllm"}), frozenset({"sglang"})
"""Values of Family.unread_by_engines."""


@dataclass(frozen=True)
class Family:
    """One model_type with its weight table (`rows`) and `model_arguments`, both functions of config.json.

    build_rows, build_arguments: the same functions of a config.json that contains the `defaults`.
    defaults: fields of the family's configuration class in transformers -> default (COMPUTED: from other fields).
    nullable: keys of `defaults` whose null the two functions handle.
    engine_fields: fields that inference engines need in config.json and that transformers omits or writes as null.
    transformers_type: model_type under which transformers registers the family, if different.
    architecture: class name in transformers, by which inference engines select their implementation.
    own_fields: fields of parts.engine_fields.NEUTRAL and ROTATION_INSIDE that transformers and engines interpret in the
    same way for this family, so they are neither overridden nor rejected.
    absent_for_engines: fields whose mere presence, even as null, changes an engine's model.
    unread_by_engines: field -> engines that ignore it for this family.
    ignored_tensors: prefixes of tensors in published checkpoints that transformers' class does not read.
    refused_by_engines: engine -> reason why it cannot compute this family like transformers.
    engine_values: function from config.json to the fields that engines must read with another value.
    check_vllm, check_sglang: functions that raise ConversionError for a config.json from which the engine's
    implementation, which has constants in place of some fields, builds another model.
    vllm_imports: optional packages that vLLM's implementation imports.
    """

    model_type: str
    build_rows: Callable[[HFConfig], list[Row]]
    build_arguments: Callable[[HFConfig], ModelArguments]
    description: Description
    defaults: HFConfig = field(default_factory=dict)
    nullable: tuple[str, ...] = ()
    engine_fields: HFConfig = field(default_factory=dict)
    transformers_type: str = ""
    architecture: str = field(kw_only=True)
    own_fields: frozenset[str] = frozenset()
    absent_for_engines: frozenset[str] = frozenset()
    unread_by_engines: Mapping[str, frozenset[str]] = field(default_factory=dict)
    ignored_tensors: tuple[str, ...] = ()
    refused_by_engines: Mapping[str, str] = field(default_factory=dict)
    engine_values: Callable[[HFConfig], dict[str, object]] = lambda config: {}
    check_vllm: Callable[[HFConfig], None] = lambda config: None
    check_sglang: Callable[[HFConfig], None] = lambda config: None
    vllm_imports: tuple[str, ...] = ()

    def rows(self, config: HFConfig) -> list[Row]:
        """Return the weight table.

        Raises: ConversionError for a configuration that the family cannot represent.
        """
        complete = hf_config.ConfigWithDefaults(config, self.defaults, self.nullable)
        with complete.explained():
            return self.build_rows(complete)

    def model_arguments(self, config: HFConfig) -> ModelArguments:
        """Return the arguments of the model.

        Raises: ConversionError for a configuration that the family cannot represent.
        """
        complete = hf_config.ConfigWithDefaults(config, self.defaults, self.nullable)
        with complete.explained():
            return self.build_arguments(complete)


def grouped_attention(
    config: HFConfig,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    bias_of_qkv_only: bool = False,
    layer_types: tuple[str, ...] = hf_config.FULL_ATTENTION,
) -> TransformerArguments:
    """Read the arguments of grouped-query attention and reject unsupported attention settings.

    qkv_bias: whether q, k and v have biases.
    qk_norm: whether query and key heads have RMS norms.
    bias_of_qkv_only: attention_bias of this family applies to q, k and v but not to o_proj.
    layer_types: supported values in the list layer_types.
    """
    hf_config.refuse_unsupported(config, layer_types)
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
    return {
        "hidden_size": hidden,
        "num_attention_heads": num_heads,
        "num_query_groups": num_groups,
        "kv_channels": head_dim,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
    }


def embedding_rows(config: HFConfig) -> list[Row]:
    """Return the rows of embedding, final norm and head. A tied head repeats the embedding."""
    hidden, vocab = integer(config, "hidden_size"), integer(config, "vocab_size")
    tied = flag(config, "tie_word_embeddings")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    row = partial(Row, shapes=((vocab, hidden),), transform=Vocabulary(), axis="tp", split_by="vocab_size")
    # Some tied checkpoints store the head as well; its values must then equal the embedding.
    redundant = (head,) if tied else ()
    return [
        row(mcore="embedding.word_embeddings.weight", hf=(embedding,), place="embedding", redundant=redundant),
        whole_row(FINAL_NORM, "model.norm.weight", (hidden,), place="head"),
        row(mcore="output_layer.weight", hf=(embedding if tied else head,), place="head", copy_of_embedding=tied),
    ]


def whole_row(mcore: str, hf: str, shape: Shape, layers: Sequence[int] = (), *, place: Place = "layer") -> Row:
    """Return the row of a tensor that every rank of the stage holds."""
    return Row(mcore=mcore, hf=(hf,), shapes=(shape,), transform=Same(), layers=tuple(layers), place=place)


def attention_rows(attention: TransformerArguments, layers: Sequence[int]) -> list[Row]:
    """Return the rows of the norms before attention and MLP, of all attention projections, and of q and k norms."""
    mcore, hf, hidden = "decoder.layers.{l}.", "model.layers.{l}.", attention["hidden_size"]
    num_groups, head_dim = attention["num_query_groups"], attention["kv_channels"]
    output_columns, kv_rows = attention["num_attention_heads"] * head_dim, num_groups * head_dim
    # With an output gate, q_proj has a query and a gate for each head.
    gated = attention.get("attention_output_gate", False)
    q_rows = output_columns * (2 if gated else 1)
    row = partial(Row, axis="tp", layers=tuple(layers))
    # HF names the norm before the MLP after the attention that precedes it, unless attention has a norm of its own.
    norms = ["post_attention_layernorm"]
    if attention.get("post_norms"):
        norms = ["pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"]
    qkv = partial(row, transform=GroupedQKV(num_groups, gated=gated), split_by="num_key_value_heads")
    rows = [
        whole_row(f"{mcore}input_layernorm.weight", f"{hf}input_layernorm.weight", (hidden,), layers),
        qkv(
            mcore=f"{mcore}self_attention.linear_qkv.weight",
            hf=tuple(f"{hf}self_attn.{part}_proj.weight" for part in "qkv"),
            shapes=((q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)),
            fp8=True,
        ),
        # Row-parallel: its columns are divided, like the heads that it reads.
        row(
            mcore=f"{mcore}self_attention.linear_proj.weight",
            hf=(f"{hf}self_attn.o_proj.weight",),
            shapes=((hidden, output_columns),),
            transform=Same(),
            dim=1,
            split_by="num_attention_heads * head_dim",
            fp8=True,
        ),
        whole_row(f"{mcore}pre_mlp_layernorm.weight", f"{hf}{norms[0]}.weight", (hidden,), layers),
        *(
            whole_row(f"{mcore}{own}.weight", f"{hf}{other}.weight", (hidden,), layers)
            for own, other in zip(("post_self_attn_layernorm", "post_mlp_layernorm"), norms[1:], strict=False)
        ),
    ]
    if attention["add_qkv_bias"]:
        names = tuple(f"{hf}self_attn.{part}_proj.bias" for part in "qkv")
        shapes = ((q_rows,), (kv_rows,), (kv_rows,))
        rows.append(qkv(mcore=f"{mcore}self_attention.linear_qkv.bias", hf=names, shapes=shapes))
    for part in "qk" if attention["qk_layernorm"] else "":
        own, other = f"{mcore}self_attention.{part}_layernorm.weight", f"{hf}self_attn.{part}_norm.weight"
        rows.append(whole_row(own, other, (head_dim,), layers))
    if attention.get("qk_norm_over_heads"):
        heads = Heads(num_heads=attention["num_attention_heads"])
        rows += [
            _head_norm_row("q", q_rows, heads, row, "num_attention_heads"),
            _head_norm_row("k", kv_rows, KeyValueHeads(num_heads=num_groups), row, "num_key_value_heads"),
        ]
    return rows


def _head_norm_row(part: str, size: int, heads: Heads, row: Callable[..., Row], split_by: str) -> Row:
    """Return the row of a norm over all heads, divided like the heads."""
    names = (f"decoder.layers.{{l}}.self_attention.{part}_layernorm", f"model.layers.{{l}}.self_attn.{part}_norm")
    mcore, hf = (f"{name}.weight" for name in names)
    return row(mcore=mcore, hf=(hf,), shapes=((size,),), transform=heads, split_by=split_by)


def decoder_arguments(config: HFConfig, attention: TransformerArguments) -> TransformerArguments:
    """Return the TransformerConfig arguments of a pre-norm decoder with RMS norms and gated SiLU."""
    return {
        **attention,
        "num_layers": integer(config, "num_hidden_layers"),
        "ffn_hidden_size": integer(config, "intermediate_size"),
        "layernorm_epsilon": number(config, "rms_norm_eps", 1e-6, positive=True),
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": number(config, "attention_dropout", 0.0),
        # These families have no dropout after attention and MLP, and no field for it.
        "hidden_dropout": 0.0,
        "init_method_std": number(config, "initializer_range", 0.02, positive=True),
    }


def model_arguments(
    config: HFConfig,
    transformer: TransformerArguments,
    *,
    rope_types: tuple[str, ...] = ROPE_TYPES,
    partial_rotation: bool = False,
) -> ModelArguments:
    """Combine TransformerConfig arguments with the other arguments of GPTModel.

    rope_types: supported rope types; the default is for grouped-query attention.
    partial_rotation: see `partial` of rotary.
    """
    head_dim = transformer.get("qk_pos_emb_head_dim", transformer["kv_channels"])
    return ModelArguments(
        transformer=transformer,
        vocab_size=integer(config, "vocab_size"),
        max_position_embeddings=integer(config, "max_position_embeddings"),
        rotary=rotary(config, head_dim, known=rope_types, partial=partial_rotation),
        tied_embeddings=flag(config, "tie_word_embeddings"),
    )


ReadAttention = Callable[[HFConfig], TransformerArguments]


def dense_rows(read_attention: ReadAttention, config: HFConfig) -> list[Row]:
    """Return the weight table of a decoder without experts."""
    attention, layers = read_attention(config), range(integer(config, "num_hidden_layers"))
    return [*embedding_rows(config), *attention_rows(attention, layers), *gated_mlp.mlp_rows(config, layers)]


def dense_arguments(read_attention: ReadAttention, config: HFConfig) -> ModelArguments:
    """Return the arguments of a decoder without experts."""
    return model_arguments(config, decoder_arguments(config, read_attention(config)))
