"""Weights of a run that are rejected before a process starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mcore_rl.config.models import ActorConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import ModelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.preparation.models import check_weights
from tests.tiny_models import add_mtp_layer, write_tiny_model


def role_of(directory: Path, mtp: float = 0.0) -> ModelRole:
    section = ActorConfig(mtp_loss_coefficient=mtp)
    return ModelRole("actor", section=section, model=ModelConfig(hf_path=str(directory)))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("mtp"), "glm4_moe")
    add_mtp_layer(directory)
    return directory


@pytest.fixture
def model(released: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for file in released.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def change(directory: Path, name: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensors[name] + 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def add_file(directory: Path, number: float) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({"lm_head.weight": tensors["lm_head.weight"] + number}, directory / "more.safetensors")


REJECTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "unlisted copy": (lambda d: add_file(d, 1), r"more\.safetensors has other values of lm_head\.weight"),
    "diverged copy": (
        lambda d: change(d, "model.layers.4.embed_tokens.weight"),
        r"embed_tokens\.weight differs from .*actor\.mtp_loss_coefficient=0",
    ),
    "link": (lambda d: (d / "vocab.json").symlink_to("/etc/hostname"), r"vocab\.json leaves the model directory"),
    "quantised": (
        lambda d: (d / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}'),
        r"\(modelopt, NVFP4\)",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_check_weights_rejects_before_the_start(case: str, model: Path) -> None:
    assert check_weights(role_of(model, mtp=0.1)) > 0
    damage, message = REJECTED[case]
    damage(model)
    with pytest.raises(ConfigError, match=rf"model\.hf_path=.*{message}"):
        check_weights(role_of(model, mtp=0.1))


def test_check_weights_without_mtp_ignores_its_copies(model: Path) -> None:
    change(model, "model.layers.4.embed_tokens.weight")
    assert check_weights(role_of(model)) > 0


def test_check_weights_names_harmless_files(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_file(model, 0)
    (model / "pytorch_model.bin").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        check_weights(role_of(model, mtp=0.1))
    assert "more.safetensors contains copies of listed tensors and is ignored" in caplog.text
    assert "pytorch_model.bin is ignored" in caplog.text
