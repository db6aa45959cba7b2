"""Tiny model with norms after attention and MLP, and the norms of a layer in both formats."""

from __future__ import annotations

CONFIGS: dict[str, dict[str, object]] = {
    "gemma3_text": {
        "model_type": "gemma3_text",
        "vocab_size": 23,  # no tp divides it
        "hidden_size": 12,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,  # fewer than tp 4
        "head_dim": 6,
        "intermediate_size": 20,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 64,
        "query_pre_attn_scalar": 6,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
}


def norm_names(config: dict[str, object]) -> dict[str, str]:
    """Return the names of a layer's norms in Megatron -> those in HF, without `_layernorm`."""
    names = {"input": "input", "pre_mlp": "post_attention"}
    after = {"pre_mlp": "pre_feedforward", "post_self_attn": "post_attention", "post_mlp": "post_feedforward"}
    return names | after if config["model_type"] in CONFIGS else names
