"""Arguments of Megatron's GPTModel and its TransformerConfig as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from model_converters.families.parts.rotary import RotarySettings
from model_converters.families.parts.vision import VisionArguments


class TransformerArguments(TypedDict, total=False):
    """Keyword arguments of Megatron's TransformerConfig as plain values.

    activation_func is a name ("silu", "quick_gelu", "gelu_tanh"); mcore_rl.megatron replaces it by the function.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    layernorm_epsilon: float
    normalization: str
    activation_func: str
    gated_linear_unit: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    qk_layernorm: bool
    layernorm_zero_centered_gamma: bool
    attention_output_gate: bool
    attention_dropout: float
    hidden_dropout: float
    init_method_std: float
    rotary_interleaved: bool
    # Gates (activation(min(g, clamp)) * (clamp(u) + offset)), attention sinks and sliding windows.
    activation_func_clamp_value: float
    glu_linear_offset: float
    softmax_type: str
    window_size: tuple[int, int]
    window_attn_skip_freq: list[int]
    # Factor of attention scores; absent: 1 / sqrt(kv_channels).
    softmax_scale: float
    # Linear attention; linear_attention_freq is 1 for each layer that has it, else 0.
    experimental_attention_variant: str
    linear_attention_freq: list[int]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    # Experts.
    num_moe_experts: int
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int
    moe_shared_expert_gate: bool
    moe_layer_freq: list[int]
    moe_router_topk: int
    moe_router_score_function: str
    moe_router_pre_softmax: bool
    moe_router_enable_expert_bias: bool
    moe_router_topk_scaling_factor: float
    moe_router_num_groups: int
    moe_router_group_topk: int
    # Latent attention (MLATransformerConfig).
    multi_latent_attention: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    rotary_base: float
    rope_type: str
    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    # Indexers of sparse attention.
    dsa_indexer_n_heads: int
    dsa_indexer_head_dim: int
    dsa_indexer_topk: int
    # Rotation by positions in time, height and width (parts/vision.py).
    mrope_section: list[int]
    # OWN_ARGUMENTS.
    dsa_indexer_interleaved: bool
    mrope_interleaved: bool
    qk_norm_over_heads: bool
    post_norms: bool
    embedding_scale: float
    moe_router_bias_in_row: bool


OWN_ARGUMENTS = frozenset(
    {
        *("dsa_indexer_interleaved", "mrope_interleaved", "qk_norm_over_heads", "post_norms", "embedding_scale"),
        "moe_router_bias_in_row",
    }
)
"""TransformerArguments that Megatron does not have.

dsa_indexer_interleaved: the rotation of indexers pairs neighbouring elements (model/attention/indexer.py).
mrope_interleaved: pairs of elements rotate by time, height and width in turn, not in blocks.
qk_norm_over_heads: q and k have RMS norms over all heads of a token (model/head_norm.py), instead of qk_layernorm.
post_norms: the outputs of attention and MLP have norms too (model/post_norms.py).
embedding_scale: factor of the embeddings, rounded to their dtype.
moe_router_bias_in_row: the correction bias of a router is [1, experts].
"""


@dataclass(frozen=True)
class ModelArguments:
    """Arguments of a GPTModel.

    rotary: rotation of all layers; with window_rotary, of layers without a sliding window.
    mtp_num_layers: number of multi-token-prediction layers.
    latent_norm_epsilon: epsilon of the two norms inside multi-head latent attention, for which Megatron would use the
    model's epsilon; None without such norms.
    vision: vision tower; None for a text model.
    """

    transformer: TransformerArguments
    vocab_size: int
    max_position_embeddings: int
    rotary: RotarySettings
    tied_embeddings: bool
    mtp_num_layers: int = 0
    latent_norm_epsilon: float | None = None
    window_rotary: RotarySettings | None = None
    vision: VisionArguments | None = None
