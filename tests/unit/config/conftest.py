"""A configuration of one node with four slots, and directories of small models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HF = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Path of a configuration with a model; the same directory has further models `scorer` and `judge`."""
    for name in ("model", "scorer", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(HF))
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{hf_path: {tmp_path}/model}}\ndata: {{train: t.jsonl}}\n"
        "cluster: {gpus_per_node: 4}\n"
    )
    return str(path)
