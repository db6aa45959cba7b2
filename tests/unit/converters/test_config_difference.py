"""Differences of two config.json files that change the computation."""

from __future__ import annotations

import pytest

from model_converters.dcp.verify import config_differences
from tests.tiny_models import tiny_fields

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
