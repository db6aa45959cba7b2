"""SGLang with latent attention and with whole experts per rank: exact weights after each of three updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.errors import WeightSyncError
from tests.contract.engines import WITH_SGLANG, RemoteEngine
from tests.contract.hf_trainer import HFTrainer
from tests.contract.update_checks import TINY_BUCKET, check_greedy
from tests.selection import on_demand_unless
from tests.tiny_models import GROUPS, YARN, tiny_model

Fields = dict[str, Any]
SHARED = {"intermediate_size": 64, "moe_intermediate_size": 64}
"""Sizes of MLPs that two ranks can divide between them."""
MODELS: dict[str, tuple[str, str, Fields]] = {
    "deepseek_v3": ("deepseek_v3", "deepseek_v3", {**SHARED, **GROUPS, "rope_parameters": YARN}),
    "deepseek_v3 without q_lora": (
        "deepseek_v3", "deepseek_v3", {**SHARED, **GROUPS, "rope_parameters": YARN, "q_lora_rank": None}
    ),
    "deepseek_v2": ("deepseek_v2", "deepseek_v2", {**SHARED, "rope_parameters": YARN}),
    "kimi_k2": ("kimi_k2", "deepseek_v3", {**SHARED, "rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", "qwen3_moe", {"head_dim": 32, "intermediate_size": 64}),
}  # fmt: skip
"""Model type in config.json, model type in transformers, and fields. Experts of Qwen3-MoE have 24 rows."""
LAYOUTS: dict[str, Fields] = {"tp1": {}, "tp2": {"tp": 2}, "ep2": {"tp": 2, "expert_parallel": True}}
ALWAYS_TESTED = {("deepseek_v3", "tp2"), ("qwen3_moe", "ep2")}


@pytest.mark.parametrize("process", [pytest.param("sglang", marks=WITH_SGLANG)], indirect=True)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=on_demand_unless((name, layout) in ALWAYS_TESTED))
        for name in MODELS
        for layout in LAYOUTS
    ],
)
def test_update_three_times_equals_transformers(process: RemoteEngine, name: str, layout: str, tmp_path: Path) -> None:
    model_type, known, fields = MODELS[name]
    if (name, layout) == ("qwen3_moe", "tp2"):
        fields = fields | SHARED

    def model(seed: int) -> Any:
        return tiny_model(known, seed=seed, **fields)

    model(0).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(f'"model_type": "{known}"', f'"model_type": "{model_type}"'))
    engine = process.start(tmp_path, load_weights=False, **LAYOUTS[layout])
    # The second trainer connects again, with another size of buckets.
    for bucket_bytes, versions in ((1 << 20, (1, 2)), (TINY_BUCKET, (3,))):
        trainer = HFTrainer(model(bucket_bytes % 7), engine, bucket_bytes, 2)
        for version in versions:
            trainer.publish(version)
            trainer.overwrite_buffers()
            check_greedy(engine, trainer.model.eval(), version)
            assert trainer.certify() > 100
            trainer.perturb(version)
            with pytest.raises(WeightSyncError, match="differ"):
                trainer.certify()
