"""Cost of sequences compared with parameter counts and attention shapes computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.resolved.costs import attention_flops, sequence_cost
from tests.tiny_models import tiny_model


def test_sequence_cost_dense_model_is_two_flops_per_weight() -> None:
    model = tiny_model("qwen3")
    met = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    c = model.config
    cost = sequence_cost(c.to_dict())
    assert cost.per_token == 2 * met
    assert cost.per_pair == 2 * c.num_hidden_layers * c.num_attention_heads * 2 * c.head_dim


def test_sequence_cost_counts_selected_experts_only() -> None:
    model = tiny_model("qwen3_moe")
    c = model.config
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name}
    experts = sum(numel for name, numel in sizes.items() if ".experts." in name)
    assert experts > 0
    met = sum(sizes.values()) - experts * (1 - c.num_experts_per_tok / c.num_experts)
    assert sequence_cost(c.to_dict()).per_token == pytest.approx(2 * met)


def test_attention_flops_latent_attention_has_wider_keys() -> None:
    c = tiny_model("deepseek_v3").config
    widths = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
    assert sequence_cost(c.to_dict()).per_pair == 2 * c.num_hidden_layers * c.num_attention_heads * widths


def test_attention_flops_indexer_adds_its_scores() -> None:
    c = tiny_model("glm_moe_dsa").config
    widths = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
    heads = c.num_attention_heads * widths + c.index_n_heads * c.index_head_dim
    assert sequence_cost(c.to_dict()).per_pair == 2 * c.num_hidden_layers * heads


def test_attention_flops_window_layers_count_visible_keys() -> None:
    sizes: Any = {"num_layers": 3, "num_attention_heads": 2, "kv_channels": 4}
    windowed = sizes | {"window_size": (9, 0), "window_attn_skip_freq": [1, 0, 1]}
    tokens = 1000
    pairs = [sum(min(place, window) for place in range(1, tokens + 1)) for window in (10, tokens, 10)]
    # The formula has no terms of one key per token.
    assert attention_flops(windowed, tokens) == pytest.approx(2 * 2 * 8 * sum(pairs) / tokens, rel=2e-3)
    assert attention_flops(windowed, 10) == attention_flops(sizes, 10)


def test_linear_attention_flops_replace_pairs_of_tokens() -> None:
    """Two of four layers have linear attention, with chunks of 64 tokens."""
    model = tiny_model("qwen3_5_text")
    c = model.config
    cost = sequence_cost(c.to_dict())
    assert cost.per_pair == 2 * 2 * c.num_attention_heads * 2 * c.head_dim
    met = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    keys, values = c.linear_key_head_dim, c.linear_value_head_dim
    of_chunk = 64 * (2 * keys + 2 * keys + keys + values + 2 * values)
    assert cost.per_token == 2 * met + 2 * c.linear_num_value_heads * (of_chunk + 6 * keys * values)
