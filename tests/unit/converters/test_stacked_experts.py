"""Checkpoints that store all experts of a layer in one tensor."""

from __future__ import annotations

import pytest
import torch

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_model
from tests.unit.converters.hf_models import assert_same, bound_rows, load_rank, stored, write_hf

NAME = "model.layers.0.mlp.experts.gate_up_proj"


# Square matrices, so that the orientation cannot be told from shapes.
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 32}),
        ("mixtral", {"intermediate_size": 32}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {}),
        ("glm4_moe", {"moe_intermediate_size": 32}),
    ],
)
def test_checkpoint_of_stacked_experts_equals_hub_format(kind, changes, tmp_path):
    model = tiny_model(kind, **changes)
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    written = stored(tmp_path / "stacked")
    assert any(name.endswith("experts.gate_up_proj") for name in written)
    assert not any("experts.0." in name for name in written)
    with HFCheckpoint(tmp_path / "stacked") as checkpoint:
        check_complete(bound_rows(checkpoint.config), checkpoint.shapes)
        assert_same({name: checkpoint.read(name) for name in checkpoint.shapes}, stored(tmp_path / "hub"))


def stacked_experts(hf, prefix, num_experts):
    """Stack the experts of one layer like transformers 5."""
    experts = {name: tensor for name, tensor in hf.items() if name.startswith(f"{prefix}experts.")}
    gate, up, down = (
        torch.stack([experts[f"{prefix}experts.{expert}.{part}_proj.weight"] for expert in range(num_experts)])
        for part in ("gate", "up", "down")
    )
    others = {name: tensor for name, tensor in hf.items() if name not in experts}
    return others | {f"{prefix}experts.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}experts.down_proj": down}


def test_load_tensors_reads_stacked_and_single_experts(family_configs, random_hf, local_mcore, tmp_path):
    # Releases may stack the experts of multi-token prediction and not those of the decoder, or the other way round.
    config, layout = family_configs["deepseek_v3"], TrainLayout(8, tp=2, pp=2, ep=2, etp=2)
    hf = random_hf(config)
    mixed = stacked_experts(stacked_experts(hf, "model.layers.3.mlp.", 8), "model.layers.4.mlp.", 8)
    assert len(hf) - len(mixed) == 2 * (3 * 8 - 2)
    with HFCheckpoint(write_hf(tmp_path / "hf", config, mixed)) as checkpoint:
        for rank in range(layout.world_size):
            assert_same(load_rank(checkpoint, layout, rank), local_mcore(hf, config, layout, rank))


def test_read_stacked_expert_reads_only_its_bytes(moe_config, random_hf, tmp_path):
    hf = random_hf(moe_config)
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    with HFCheckpoint(write_hf(tmp_path, moe_config, stacked_experts(hf, "model.layers.0.mlp.", 8))) as checkpoint:
        assert checkpoint._stored[name].num_bytes == hf[name].nbytes
        assert torch.equal(checkpoint.view(name, 1, 3, 5, (1, 3)), hf[name][1:3, 3:8])


def test_stacked_experts_of_another_shape_are_rejected(moe_config, random_hf, tmp_path):
    stacked = stacked_experts(random_hf(moe_config), "model.layers.0.mlp.", 8)
    stacked[NAME] = stacked[NAME].transpose(1, 2)
    with pytest.raises(ConversionError, match=rf"{NAME} is \(8, 12, 8\) instead of \(8, 8, 12\)"):
        HFCheckpoint(write_hf(tmp_path, moe_config, stacked))


def test_expert_that_is_stored_twice_is_rejected(moe_config, random_hf, tmp_path):
    hf = random_hf(moe_config)
    both = hf | stacked_experts(hf, "model.layers.0.mlp.", 8)
    message = rf"experts\.0\.gate_proj\.weight is stored twice: also in {NAME}"
    with pytest.raises(ConversionError, match=message):
        HFCheckpoint(write_hf(tmp_path, moe_config, both))


def test_stacked_tensor_without_a_row_is_unknown(moe_config, random_hf, tmp_path):
    stacked = random_hf(moe_config) | {f"{NAME}_bias": torch.zeros(8, 8)}
    with (
        HFCheckpoint(write_hf(tmp_path, moe_config, stacked)) as checkpoint,
        pytest.raises(ConversionError, match=f"1 HF tensors unknown: {NAME}_bias"),
    ):
        check_complete(bound_rows(moe_config), checkpoint.shapes)
