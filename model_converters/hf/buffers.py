"""Rotary frequency buffers of old checkpoints. They are checked against config.json and not converted.

transformers before 4.32 saved the rotary frequencies of every layer (Llama 2 has them); newer versions ignore them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts.family import ModelArguments
from model_converters.families.parts.rotary import inverse_frequencies
from model_converters.hf.shards import StoredTensor

_FREQUENCIES = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def split_buffers(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Split the tensors into (weights, rotary frequencies)."""
    buffers = {name: tensor for name, tensor in stored.items() if _FREQUENCIES.fullmatch(name)}
    return {name: tensor for name, tensor in stored.items() if name not in buffers}, buffers


def check_frequencies(name: str, found: torch.Tensor, arguments: ModelArguments) -> None:
    """Compare saved rotary frequencies with config.json.

    Raises: ConversionError if they differ: the weights were trained with the saved frequencies.
    """
    sizes = arguments.transformer
    if sizes.get("rope_type") == "yarn":
        raise ConversionError(f"{name} cannot be compared with the scaling 'yarn' of config.json; remove the tensor")
    wanted = inverse_frequencies(arguments.rotary, sizes.get("qk_pos_emb_head_dim", sizes["kv_channels"]))
    if found.shape != wanted.shape or not found.is_floating_point():
        raise ConversionError(
            f"{name} is {tuple(found.shape)} {found.dtype}; config.json gives {len(wanted)} frequencies"
        )
    # The frequencies were computed in float32 and rounded to the checkpoint's dtype. In float16 the lowest ones are
    # subnormal, which needs the absolute tolerance.
    kind = torch.finfo(found.dtype)
    close = torch.isclose(found.float(), wanted, rtol=4 * kind.eps, atol=2 * kind.tiny * kind.eps)
    if not close.all():
        first = int((~close).nonzero()[0])
        raise ConversionError(
            f"{name} differs from the frequencies that config.json gives: element {first} is "
            f"{float(found[first]):.6g} instead of {float(wanted[first]):.6g}; the weights were trained with the saved "
            "frequencies: correct rope_theta or rope_scaling, or remove the tensor"
        )
