"""Fields of config.json that are overridden for engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.weights.engine_config import engine_overrides
from tests.tiny_models import tiny_fields

ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def written(directory: Path, **fields: object) -> Path:
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_engine_overrides_missing_fields_are_added(tmp_path: Path) -> None:
    of_transformers = written(tmp_path, **tiny_fields("deepseek_v3", topk_method=None))
    assert engine_overrides(of_transformers, load_weights=True) == ROUTING
    of_the_hub = written(tmp_path, **tiny_fields("deepseek_v3", **ROUTING))
    assert engine_overrides(of_the_hub, load_weights=True) == {}
    assert engine_overrides(written(tmp_path, **tiny_fields("llama")), load_weights=True) == {}


def test_engine_overrides_without_load_weights_removes_quantization(tmp_path: Path) -> None:
    directory = written(
        tmp_path,
        **tiny_fields("deepseek_v3", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
        | {"model_type": "kimi_k2"},
    )
    assert engine_overrides(directory, load_weights=False) == {**ROUTING, "quantization_config": None}


def test_engine_overrides_unsupported_model_names_key(tmp_path: Path) -> None:
    for fields in ({}, {"model_type": "gemma"}):
        with pytest.raises(ConfigError, match=r"model\.hf_path: .*model_type"):
            engine_overrides(written(tmp_path, **fields), load_weights=True)
