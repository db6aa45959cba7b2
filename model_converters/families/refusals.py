"""Known architectures that are not supported, with the missing features. Remove an entry when its family is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """An unsupported architecture.

    models: names of well-known models.
    missing: features to be implemented, each with the field or tensor that needs it.
    """

    models: str
    missing: tuple[str, ...]


_SPARSE_ATTENTION = (
    "attention to the index_topk tokens that an indexer chooses (tensors self_attn.indexer.*): megatron-core 0.16.1's "
    "own (experimental_attention_variant 'dsa') refuses packed sequences and needs CUDA's fast_hadamard_transform"
)
# megatron-core 0.16.1 has arguments for this arithmetic: softmax_type, window_size, window_attn_skip_freq,
# glu_linear_offset, activation_func_clamp_value, add_bias_linear. The missing parts are in this project.
_SINKS = (
    "attention sinks (tensor self_attn.sinks) and sliding windows (layer_types, sliding_window) for packed sequences "
    "without TransformerEngine"
)
_BIASES = "rows for the biases of router, experts and o_proj (attention_bias); the clamped gate (swiglu_limit)"
_TRANSPOSED_EXPERTS = (
    "a transform for experts stored as one transposed tensor, gate and up interleaved (mlp.experts.gate_up_proj)"
)
_MXFP4 = "a reader of MXFP4 blocks (quantization_config)"

REFUSED: Mapping[str, Refusal] = {
    "deepseek_v32": Refusal("DeepSeek-V3.2", (_SPARSE_ATTENTION,)),
    "glm_moe_dsa": Refusal("GLM-5", (_SPARSE_ATTENTION,)),
    "gpt_oss": Refusal("gpt-oss-20b, gpt-oss-120b", (_SINKS, _BIASES, _TRANSPOSED_EXPERTS, _MXFP4)),
}
