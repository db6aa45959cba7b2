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


_STACKED_EXPERTS = "rows for experts stored as one tensor (feed_forward.experts.gate_up_proj)"

_COMPRESSED_ATTENTION = (
    "attention over compressed keys and values that all heads share, of two kinds (layer_types), with an output "
    "projection in groups of low rank"
)
_HYPER_CONNECTIONS = "several residual streams that learned matrices mix (hc_mult)"
_HASH_ROUTING = "experts chosen by token id in the first layers (num_hash_layers), and sqrtsoftplus scores"
_STATE_SPACE = (
    "layers of Mamba-2 (hybrid_override_pattern): megatron-core 0.16.1 has them in another model class, and they need "
    "mamba_ssm"
)
_INPUTS_OF_LAYERS = (
    "embeddings of each layer (hidden_size_per_layer_input), and layers that share keys and values "
    "(num_kv_shared_layers) or differ in size (per_layer_config)"
)
_CHUNKED_ATTENTION = "attention within chunks of attention_chunk_size tokens, whose scale depends on the position"
_NORM_AFTER_ROTATION = "norms of queries and keys after their rotation (use_qk_norm)"

REFUSED: Mapping[str, Refusal] = {
    "deepseek_v4": Refusal("DeepSeek-V4", (_HYPER_CONNECTIONS, _COMPRESSED_ATTENTION, _HASH_ROUTING)),
    "gemma4": Refusal("Gemma 4", (_INPUTS_OF_LAYERS,)),
    "gemma4_text": Refusal("Gemma 4 (text)", (_INPUTS_OF_LAYERS,)),
    "llama4": Refusal("Llama 4 Scout, Maverick", (_CHUNKED_ATTENTION, _NORM_AFTER_ROTATION, _STACKED_EXPERTS)),
    "llama4_text": Refusal("Llama 4 (text)", (_CHUNKED_ATTENTION, _NORM_AFTER_ROTATION, _STACKED_EXPERTS)),
    "nemotron_h": Refusal("Nemotron-H, Nemotron 3", (_STATE_SPACE,)),
}
