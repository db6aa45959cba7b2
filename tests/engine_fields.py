"""Values of the fields that only inference engines read, with which an engine would compute another model."""

from __future__ import annotations

from typing import Any

OTHER_VALUES: dict[str, Any] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size", "rswa_window"), 8),
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": [1, 1],
    "logit_scale": 0.5,
    "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 2.0,
    "scale_emb": 2.0,
    "llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 1.0},
    "head_dtype": "bfloat16",
    "enable_lm_head_fp32": True,
    "enable_lm_head_output_fp32": True,
    **dict.fromkeys(("bias", "qkv_bias", "qk_norm", "use_ngram_embedding", "multi_query"), True),
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    **dict.fromkeys(("n_head_kv", "num_kv_heads"), 1),
    "original_num_attention_heads": 8,
    "num_attention_heads_per_layer": [2, 2],
    **dict.fromkeys(("hidden_size_per_head", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), 8),
    "block_configs": [{"block_type": "moe", "n_routed_experts": 2}],
    **dict.fromkeys(("loop_num", "num_loops", "hc_mult"), 2),
    "rope_is_neox_style": False,
    **dict.fromkeys(("rotary_pct", "rotary_emb_fraction"), 0.25),
    "rotary_emb_base": 100.0,
    "mrope_section": [4, 6, 6],
    "xdrope_section": [4, 6, 6],
    "swiglu_limit": 0.5,
    "num_hash_layers": 1,
    "use_moe": False,
    "router_fp32": True,
    "routing_method_type": 0,
    **dict.fromkeys(("is_encoder_decoder", "use_bidirectional_attention", "is_mm_prefix_lm"), True),
    "canvas_length": 4,
    "index_topk": 4,
    "compress_ratios": [4],
}
