"""Weight files that the index does not list: rejected if some reader uses them, otherwise reported."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from tests.tiny_models import write_tiny_model
from tests.unit.converters.hf_models import write_hf

A, B, C = torch.arange(24.0).view(4, 6), torch.arange(5.0).double(), torch.ones(3).bfloat16()
MTP = {"model.layers.4.eh_proj.weight": A.clone()}


@pytest.fixture
def sharded(tmp_path, dense_config):
    """A directory with two listed shards."""
    (tmp_path / "config.json").write_text(json.dumps(dense_config))
    save_file({"a": A, "b": B}, tmp_path / "model-1.safetensors")
    save_file({"c": C}, tmp_path / "model-2.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


@pytest.fixture
def single(tmp_path, dense_config):
    return write_hf(tmp_path, dense_config, {"a": A, "b": B, "c": C})


REJECTED = {
    "mtp.safetensors": (MTP, r"mtp\.safetensors contains model\.layers\.4\.eh_proj\.weight: add it"),
    "a-copy.safetensors": ({"a": A.bfloat16()}, "contains a with another dtype or shape"),
    "b-copy.safetensors": ({"b": B[:4].clone()}, "contains b with another dtype or shape"),
    "model.fp16.safetensors": ({"d": A.half()}, "contains d: add it"),
    "adapter_model.safetensors": ({"base_model.model.a.lora_A.weight": A}, "is an adapter, .*merge it"),
}


@pytest.mark.parametrize("layout", ["sharded", "single"])
def test_find_unlisted_file_that_changes_model_is_rejected(layout, request):
    directory = request.getfixturevalue(layout)
    for name, (tensors, message) in REJECTED.items():
        save_file(tensors, directory / name)
        with pytest.raises(ConversionError, match=message):
            HFCheckpoint(directory)
        (directory / name).unlink()


def test_find_unlisted_unreadable_files_are_rejected_together(sharded):
    (sharded / "x.safetensors").write_bytes(b"version https://git-lfs")
    (sharded / "y.safetensors").mkdir()
    (sharded / "adapter_config.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"adapter_config.*x\.safetensors is not a safe.*y\.safetensors is a dir"):
        HFCheckpoint(sharded)


def test_find_unlisted_incomplete_single_file_is_rejected(sharded):
    """transformers reads only model.safetensors if it exists."""
    save_file({"a": A, "b": B}, sharded / "model.safetensors")
    with pytest.raises(ConversionError, match=r"model\.safetensors lacks c, but transformers reads only this file"):
        HFCheckpoint(sharded)


def test_transformers_prefers_single_file_to_index(tmp_path):
    directory = write_tiny_model(tmp_path / "hf", "qwen3")
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.save_pretrained(tmp_path / "two", max_shard_size="40KB")
    model.lm_head.weight.data += 1
    save_file(model.state_dict(), tmp_path / "two" / "model.safetensors", metadata={"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert torch.equal(read.lm_head.weight, model.lm_head.weight)
    with HFCheckpoint(tmp_path / "two") as checkpoint:
        assert not torch.equal(checkpoint.read("lm_head.weight"), model.lm_head.weight)
        with pytest.raises(ConversionError, match=r"model\.safetensors has other values of lm_head\.weight"):
            checkpoint.unlisted.check_copies()


@pytest.mark.parametrize("layout", ["sharded", "single"])
def test_find_unlisted_copies_are_reported_and_compared(layout, request):
    directory = request.getfixturevalue(layout)
    other = "model.safetensors" if layout == "sharded" else "model-00001-of-00001.safetensors"
    save_file({"a": A, "b": B, "c": C}, directory / other)
    with HFCheckpoint(directory) as checkpoint:
        assert checkpoint.unlisted.notes == (f"{other} contains copies of listed tensors and is ignored",)
        checkpoint.unlisted.check_copies()
    save_file({"a": A, "b": B + 1, "c": C}, directory / other)
    with HFCheckpoint(directory) as checkpoint, pytest.raises(ConversionError, match=f"{other} has other values of b"):
        checkpoint.unlisted.check_copies()


def test_find_unlisted_reports_other_formats_not_trainer_state(sharded):
    for name in ("pytorch_model.bin", "model.gguf", "consolidated.00.pth", "training_args.bin", "optimizer.pt"):
        (sharded / name).write_bytes(b"")
    for folder, file in (("original", "consolidated.00.pth"), ("onnx", "model.onnx"), ("assets", "logo.png")):
        (sharded / folder).mkdir()
        (sharded / folder / file).write_bytes(b"")
    with HFCheckpoint(sharded) as checkpoint:
        names = {note.split(" ")[0] for note in checkpoint.unlisted.notes}
    assert names == {"pytorch_model.bin", "model.gguf", "consolidated.00.pth", "original/", "onnx/"}


def test_find_unlisted_consolidated_without_index_is_rejected(sharded):
    """Without an index vLLM reads it in addition to model.safetensors."""
    save_file({"layers.0.attention.wq.weight": A}, sharded / "consolidated.safetensors")
    with HFCheckpoint(sharded) as checkpoint:
        assert checkpoint.unlisted.notes == ("consolidated.safetensors (Mistral's format) is ignored",)
    (sharded / "model.safetensors.index.json").unlink()
    for file in sharded.glob("model-*"):
        file.unlink()
    save_file({"a": A}, sharded / "model.safetensors")
    with pytest.raises(ConversionError, match=r"consolidated\.safetensors contains layers\.0\.attention\.wq\.weight"):
        HFCheckpoint(sharded)
