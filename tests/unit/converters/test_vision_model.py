"""Files of models with a vision tower, which transformers writes and reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.hf_config import read_hf_config
from model_converters.hf.io import HFCheckpoint
from model_converters.vision_model import VISION_TYPES, flat_fields, nested_fields, nested_overrides
from tests.tiny_models import tiny_config, tiny_fields, write_tiny_model


@pytest.mark.parametrize("kind", VISION_TYPES)
def test_nested_fields_of_flat_ones_give_the_same_model(kind: str) -> None:
    written = tiny_config(kind).to_diff_dict()
    flat = flat_fields(written)
    assert flat["num_hidden_layers"] == 4
    assert flat["model_type"] == kind
    again = nested_fields(flat)
    assert again["text_config"] | written["text_config"] == again["text_config"]
    assert flat_fields(again) == flat
    rows = family_for(flat).rows(flat)
    assert rows == family_for(flat_fields(again)).rows(flat_fields(again))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", VISION_TYPES)
def test_tower_does_not_depend_on_model_type_of_vision_config(kind: str, named: bool) -> None:
    """The hub's files name the whole model in vision_config, or nothing. transformers ignores the name."""
    fields = tiny_fields(kind)
    written, vision = family_for(fields).model_arguments(fields).vision, dict(fields["vision_config"])
    del vision["model_type"]
    released = {**fields, "vision_config": {**vision, "model_type": kind} if named else vision}
    found = family_for(released).model_arguments(released).vision
    assert found == written
    assert found is not None
    with torch.device("meta"):
        tower = AutoModel.from_config(AutoConfig.for_model(**found.config))
        whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**nested_fields(released)))
    assert type(tower) is type(whole.model.visual)
    shapes = {name: weight.shape for name, weight in tower.named_parameters()}
    assert shapes == {name: weight.shape for name, weight in whole.model.visual.named_parameters()}


def test_flat_file_of_qwen2_5_vl_is_read() -> None:
    """The hub's files have the text model's fields on the top level, and a rotation of type mrope."""
    fields = tiny_fields("qwen2_5_vl")
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    older = {key: value for key, value in fields.items() if key != "rope_parameters"} | {"rope_scaling": rope}
    assert family_for(older).model_arguments(flat_fields(older)) == family_for(fields).model_arguments(fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"model_type": "llama"}}, "needs a text_config with model_type 'qwen3_vl_text'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but text_config.tie_word_embeddings False"),
    ],
)
def test_flat_fields_of_contradicting_file_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        flat_fields(nested_fields(tiny_fields("qwen3_vl")) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "lacks vision_config"),
        ({"hidden_size": 48}, r"out_hidden_size 32 differs from the text model's hidden_size 48"),
        ({"num_hidden_layers": 1}, "has 2 entries, more than decoder layers"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 1]}}, "whose sum is the 8 rotated pairs"),
    ],
)
def test_tower_that_does_not_fit_is_rejected(changes: dict[str, Any], message: str) -> None:
    fields = tiny_fields("qwen3_vl", **changes)
    with pytest.raises(ConversionError, match=message):
        family_for(fields).model_arguments(fields)


def test_overrides_of_text_fields_are_nested() -> None:
    """vLLM updates a nested configuration with a nested object."""
    overrides = {"architectures": ["A"], "norm_topk_prob": True}
    assert nested_overrides({"model_type": "llama"}, overrides) == overrides
    nested = nested_overrides({"model_type": "qwen3_vl_moe"}, overrides)
    assert nested == {"architectures": ["A"], "text_config": {"norm_topk_prob": True}}


def _transpose_experts(directory: Path) -> None:
    """Store experts in the orientation of the hub's files."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    turned = {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in tensors.items()}
    save_file(turned, path, metadata={"format": "pt"})


def test_experts_of_both_orientations_are_the_same_model(tmp_path: Path) -> None:
    for name in ("ours", "hub"):
        write_tiny_model(tmp_path / name, "qwen3_vl_moe")
    _transpose_experts(tmp_path / "hub")
    with HFCheckpoint(tmp_path / "ours") as ours, HFCheckpoint(tmp_path / "hub") as hub:
        assert ours.shapes == hub.shapes
        assert all(torch.equal(ours.read(name), hub.read(name)) for name in ours.shapes)


@pytest.mark.parametrize("intermediate", [16, 32])
def test_square_experts_are_rejected(intermediate: int, tmp_path: Path) -> None:
    """gate_up_proj is square if 2 I = h, and down_proj if I = h."""
    write_tiny_model(tmp_path, "qwen3_vl_moe", num_hidden_layers=2, moe_intermediate_size=intermediate)
    with pytest.raises(ConversionError, match="has square matrices"):
        HFCheckpoint(tmp_path)


def test_tensor_under_two_names_is_rejected(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen2_5_vl", num_hidden_layers=1)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.visual.merger.ln_q.weight": tensors["visual.merger.ln_q.weight"].clone()}, path)
    with pytest.raises(ConversionError, match=r"both named model\.visual\.merger\.ln_q\.weight"):
        HFCheckpoint(tmp_path)


def test_export_writes_nested_file(tmp_path: Path) -> None:
    from model_converters.mapping.layout import TrainLayout
    from tests.exported import export_through

    write_tiny_model(tmp_path / "hf", "qwen3_vl")
    export_through(tmp_path / "hf", tmp_path / "out", TrainLayout(2, tp=2))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"]["num_hidden_layers"] == 4
    assert "num_hidden_layers" not in written
    assert read_hf_config(tmp_path / "out") == read_hf_config(tmp_path / "hf")
