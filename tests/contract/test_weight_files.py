"""Weight files that engines read; model_converters.hf.unlisted_files relies on this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.vllm.arguments import engine_arguments
from model_converters.errors import ConversionError
from model_converters.hf.index import read_headers
from model_converters.hf.unlisted_files import find_unlisted
from tests.selection import needs_package
from tests.tiny_models import tiny_fields

pytestmark = needs_package("vllm", "make setup")


def read_by_vllm(directory: Path, load_format: str) -> set[str]:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    _, files, *_ = loader._prepare_weights(str(directory), None, None, True, None)
    return {Path(file).name for file in files}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("model-1", "model-2", "consolidated", "mtp"):
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    places = {name: f"{name}.safetensors" for name in ("model-1", "model-2")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    return tmp_path


def test_vllm_load_format_hf_reads_only_indexed_files(directory: Path) -> None:
    """vLLM's default prefers Mistral's consolidated file to the index."""
    (directory / "config.json").write_text(json.dumps(tiny_fields("qwen3")))
    settings = EngineSettings(directory, RolloutConfig(), dtype="float32", seed=0, timeout_seconds=60)
    arguments = engine_arguments(settings)
    listed = {"model-1.safetensors", "model-2.safetensors"}
    assert read_by_vllm(directory, arguments["load_format"]) == listed
    assert read_by_vllm(directory, "auto") == {"consolidated.safetensors"}


def test_vllm_without_index_reads_every_file(directory: Path) -> None:
    """Therefore other files next to model.safetensors are rejected, including consolidated ones."""
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model-2.safetensors").rename(directory / "model.safetensors")
    (directory / "model-1.safetensors").unlink()
    assert read_by_vllm(directory, "hf") == {"model.safetensors", "consolidated.safetensors", "mtp.safetensors"}
    with pytest.raises(ConversionError, match=r"consolidated\.safetensors contains .*mtp\.safetensors contains"):
        find_unlisted(directory, read_headers(directory))
