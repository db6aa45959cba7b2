"""Engines of FP8 releases: the trainer dequantizes the weights, so the engine must not expect FP8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.engines import start_engine
from tests.contract.hf_trainer import HFTrainer
from tests.contract.update_checks import check_greedy
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("kind", ["vllm"])
def test_engine_fp8_release_loads_unquantized_trainer_weights(kind: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3", head_dim=32, num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = start_engine(kind, tmp_path, load_weights=False)
    try:
        trainer = HFTrainer(model, engine, 1 << 20, 2)
        trainer.publish(1)
        check_greedy(engine, model, 1)
        assert trainer.certify() > 10
    finally:
        engine.shutdown()
