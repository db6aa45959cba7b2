"""Cost of sequences compared with parameter counts and attention shapes computed by hand."""

from __future__ import annotations

import pytest

from mcore_rl.resolved.costs import sequence_cost
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
