from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.mapping.table import bind


def test_bind_lists_all_names_claimed_twice(moe_config):
    rows = family_for(moe_config).rows(moe_config)
    qkv = next(row for row in rows if "linear_qkv" in row.mcore)
    other = replace(qkv, mcore="decoder.layers.{l}.other.weight", layers=(2,))
    with pytest.raises(ConversionError) as caught:
        bind([*rows, other, rows[0]], moe_config, torch.float32)
    for name in (
        "HF model.layers.2.self_attn.q_proj.weight is claimed by",
        "HF model.layers.2.self_attn.v_proj.weight is claimed by",
        "mcore embedding.word_embeddings.weight is claimed by",
    ):
        assert name in str(caught.value)
    assert "layers.1." not in str(caught.value)


def test_bind_layer_outside_model_is_rejected(moe_config):
    rows = [replace(row, layers=(3, 4)) if row.layers else row for row in family_for(moe_config).rows(moe_config)]
    with pytest.raises(ConversionError, match=r"is bound to layers \[4\] of 4"):
        bind(rows, moe_config, torch.float32)


def test_bind_placeholders_get_global_indices(moe_config):
    names = {b.mcore: b for b in bind(family_for(moe_config).rows(moe_config), moe_config, torch.float32)}
    bound = names["decoder.layers.3.mlp.experts.linear_fc1.weight7"]
    assert bound.hf == ("model.layers.3.mlp.experts.7.gate_proj.weight", "model.layers.3.mlp.experts.7.up_proj.weight")
    assert (bound.layer, bound.expert, bound.group) == (3, 7, "layer.3")
    assert not any("{" in name for name in names)
