"""Text model inside a release that also reads images, which transformers writes and computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.layout import TrainLayout
from model_converters.text_model import TEXT_TYPES, text_fields, text_tensors
from tests.exported import export_through
from tests.tiny_models import VOCABULARY, tiny_fields

_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
_GEMMA_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "vision_use_head": False,
}
_KIMI_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "pos_emb_time": 1,
}
_VISION = {"gemma3": _GEMMA_VISION, "kimi_k25": _KIMI_VISION}
_WRITTEN_TYPES = TEXT_TYPES | {"kimi_k25": "deepseek_v3"}
"""model_type that transformers writes into text_config."""


def _release(directory: Path, kind: str) -> torch.nn.Module:
    """Write a tiny release with a vision tower."""
    torch.manual_seed(0)
    vision = _VISION.get(kind, _QWEN_VISION)
    # The head of a release is tied unless its own config.json, outside of text_config, says otherwise.
    tied = {"tie_word_embeddings": kind == "gemma3"}
    text = tiny_fields(_WRITTEN_TYPES[kind], **tied)
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision, **tied)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(directory)
    if kind == "kimi_k25":
        model = _with_published_names(directory)
    # Without this field, only the text model is used.
    written = json.loads((directory / "config.json").read_text())
    del written["vision_config"]
    (directory / "config.json").write_text(json.dumps(written))
    return model


def _with_published_names(directory: Path) -> torch.nn.Module:
    """Give Kimi-K2.5's tensors their names in the release, which transformers reads but does not write; return the
    model that transformers reads then."""
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in tensors.items()}
    renamed = {name.replace("model.mm_projector.", "mm_projector."): tensor for name, tensor in renamed.items()}
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    return model.eval()


@pytest.mark.parametrize("kind", TEXT_TYPES)
def test_release_with_images_exports_text_model(kind: str, tmp_path: Path) -> None:
    model = _release(tmp_path / "hf", kind)
    with HFCheckpoint(tmp_path / "hf") as checkpoint:
        assert checkpoint.unlisted.notes[-1].endswith("tensors of the vision tower are left out")
        assert not [name for name in checkpoint.shapes if "vis" in name or "mm_" in name or "language_model" in name]
    export_through(tmp_path / "hf", tmp_path / "out", TrainLayout(2, tp=2))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert exported.config.model_type == _WRITTEN_TYPES[kind]
    assert not {"text_config", "vision_config"} & json.loads((tmp_path / "out" / "config.json").read_text()).keys()
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "needs a text_config with model_type 'qwen3_5_text'"),
        ({"text_config": {"model_type": "llama"}}, "needs a text_config"),
        ({"model_type": "kimi_k25", "text_config": {"model_type": "llama"}}, "needs a text_config .* 'kimi_k2'"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings and text_config\.tie_word_embeddings differ"),
        (
            {"text_config": {"model_type": "qwen3_5_text", "quantization_config": {"quant_method": "fp8"}}}
            | {"quantization_config": {"quant_method": "compressed-tensors"}},
            r"quantization_config and text_config\.quantization_config differ; remove one of them",
        ),
    ],
)
def test_text_fields_of_another_release_are_rejected(changes: dict[str, object], message: str) -> None:
    config = {"model_type": "qwen3_5", "text_config": tiny_fields("qwen3_5_text")}
    with pytest.raises(ConversionError, match=message):
        text_fields(config | changes)


def test_family_for_release_with_images_names_the_remedy() -> None:
    with pytest.raises(ConversionError, match=r"'qwen3_5' is .* to-mcore, then to-hf"):
        family_for({"model_type": "qwen3_5"})


def test_text_tensors_two_names_of_one_tensor_are_rejected() -> None:
    with pytest.raises(ConversionError, match="two names of one tensor"):
        text_tensors({"model.norm.weight": 0, "model.language_model.norm.weight": 1})
