"""Errors about absent fields of config.json, and differences of two files that change the computation."""

from __future__ import annotations

import pytest

from model_converters.dcp.verify import config_differences
from model_converters.errors import ConversionError
from model_converters.families import FAMILIES
from tests.tiny_models import tiny_fields

ABSENT = [
    ("deepseek_v3", "num_key_value_heads", {}, "has no num_key_value_heads, .* default 128 .* to 4 or null"),
    ("qwen2", "num_key_value_heads", {}, "num_key_value_heads is absent; transformers' default is 32"),
    ("qwen3_moe", "num_key_value_heads", {"num_attention_heads": 6}, "transformers' default is 4"),
    ("deepseek_v3", "topk_group", {"n_group": 2}, "topk_group is absent; transformers' default is 4"),
    ("glm4_moe", "topk_group", {"n_group": 4, "num_experts_per_tok": 4}, "transformers' default is 1"),
    ("glm4_moe", "norm_topk_prob", {"num_experts_per_tok": 1}, "norm_topk_prob is absent; .* default is true"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "key", "changes", "message"), ABSENT, ids=lambda value: str(value)[:30])
def test_error_about_absent_field_states_transformers_default(
    kind: str, key: str, changes: dict[str, object], message: str
) -> None:
    fields = {name: value for name, value in (tiny_fields(kind) | changes).items() if name != key}
    with pytest.raises(ConversionError, match=message):
        FAMILIES[kind].model_arguments(fields)


def test_latent_attention_groups_equal_heads_or_are_rejected() -> None:
    fields = tiny_fields("deepseek_v3") | {"num_key_value_heads": 2}
    with pytest.raises(ConversionError, match=r"num_key_value_heads 2 is not supported, only 4 or null: ") as caught:
        FAMILIES["deepseek_v3"].model_arguments(fields)
    assert "absent" not in str(caught.value)
    assert "unset" not in str(caught.value)
    for value in (4, None):
        sizes = FAMILIES["deepseek_v3"].model_arguments(fields | {"num_key_value_heads": value})
        assert sizes.transformer["num_query_groups"] == 4


THETA = {"rope_type": "default", "rope_theta": 500000.0}


@pytest.mark.parametrize(
    ("kind", "changes", "fields"),
    [
        ("llama", {"rms_norm_eps": 1e-5}, {"rms_norm_eps"}),
        ("llama", {"rope_parameters": THETA}, {"rope_parameters"}),
        ("llama", {"rope_scaling": THETA}, {"rope_scaling"}),
        ("llama", {"rms_norm_eps": 1e-5, "use_cache": False, "transformers_version": "4.1"}, {"rms_norm_eps"}),
        ("llama", {"model_type": "qwen2"}, {"model_type"}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}, {"norm_topk_prob", "num_experts_per_tok"}),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}, {"routed_scaling_factor"}),
        # The second field alone is rejected, so both fields are named.
        ("deepseek_v3", {"num_experts_per_tok": 1, "norm_topk_prob": False}, {"num_experts_per_tok", "norm_topk_prob"}),
        ("llama", {"use_cache": False, "eos_token_id": 7}, set()),
        ("llama", {"rope_parameters": None, "rope_theta": 10000.0}, set()),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, set()),
    ],
)
def test_config_differences_names_decisive_fields(kind: str, changes: dict[str, object], fields: set[str]) -> None:
    ours = tiny_fields(kind)
    assert set(config_differences(ours | changes, ours)) == fields
    assert set(config_differences(ours, ours | changes)) == fields


def test_config_differences_show_both_values() -> None:
    ours = tiny_fields("llama")
    theirs = {key: value for key, value in ours.items() if key != "rms_norm_eps"}
    found = config_differences(theirs, ours | {"rms_norm_eps": 0.5})
    assert found == {"rms_norm_eps": "is absent in the HF directory, 0.5 in the checkpoint"}
