"""Rotary frequencies in old checkpoints: equal to transformers' module they are accepted, otherwise rejected."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.completeness import check_complete
from tests.tiny_models import LLAMA3, tiny_model, write_tiny_model
from tests.unit.converters.hf_models import bound_rows


def saved_with(directory: Path, frequencies: dict[str, torch.Tensor]) -> Path:
    file = directory / "model.safetensors"
    save_file(load_file(file) | frequencies, file, metadata={"format": "pt"})
    return directory


def llama(directory: Path, rotation: dict[str, object]) -> tuple[Path, torch.Tensor]:
    """Save a model. Returns its directory and the frequencies that transformers computes."""
    settings = {"rope_parameters": rotation, "num_hidden_layers": 2, "head_dim": 64}
    frequencies = tiny_model("llama", **settings).model.rotary_emb.inv_freq
    return write_tiny_model(directory, "llama", **settings), frequencies


DEFAULT = {"rope_type": "default", "rope_theta": 1e6}  # the lowest frequencies are subnormal in float16
PER_LAYER = "model.layers.{l}.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize("rotation", [DEFAULT, LLAMA3], ids=["default", "llama3"])
def test_saved_frequencies_are_not_converted(rotation, tmp_path):
    hf, frequencies = llama(tmp_path, rotation)
    for place, dtype in product(
        (PER_LAYER, "model.rotary_emb.inv_freq"), (torch.float32, torch.bfloat16, torch.float16)
    ):
        names = {place.format(l=layer) for layer in range(2)}
        saved_with(hf, {name: frequencies.to(dtype, copy=True) for name in names})
        with HFCheckpoint(hf) as checkpoint:
            assert not names & set(checkpoint.shapes)
            check_complete(bound_rows(checkpoint.config), checkpoint.shapes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved: saved * 1.001, "element 0 is 1.001 instead of 1"),
        (lambda saved: torch.cat((saved[:-1], saved[-1:] / 8)), "element 31 is"),  # as another rope_scaling would
        (lambda saved: saved[:-1], r"\(31,\) torch.float32; config.json gives 32 frequencies"),
        (lambda saved: saved * torch.nan, "element 0 is nan"),
    ],
    ids=["other base", "scaled", "other head", "nan"],
)
def test_saved_frequencies_that_differ_are_rejected(spoil, message, tmp_path):
    hf, frequencies = llama(tmp_path, DEFAULT)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    saved_with(hf, {name: spoil(frequencies)})
    with pytest.raises(ConversionError, match=rf"{name} .*{message}"):
        HFCheckpoint(hf)


def test_saved_frequencies_similar_name_stays_unknown(tmp_path):
    hf, frequencies = llama(tmp_path, DEFAULT)
    name = "model.layers.1.mlp.rotary_emb.inv_freq"
    with HFCheckpoint(saved_with(hf, {name: frequencies})) as checkpoint:
        assert name in checkpoint.shapes
