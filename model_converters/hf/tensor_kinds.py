"""Kinds of tensors in an HF directory: weights, scales of FP8 weights, rotary frequencies, and unsupported ones.

transformers before 4.32 saved the rotary frequencies of every layer (Llama 2 has them); newer versions ignore them.
They are checked against config.json and not converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from model_converters.errors import ConversionError, listing
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.rotary import inverse_frequencies
from model_converters.hf.quant import FP8, SCALE_SUFFIX, Block, scale_shape
from model_converters.hf.shards import StoredTensor

_FREQUENCIES = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_OTHER_FLOAT8 = (torch.float8_e5m2, torch.float8_e8m0fnu)


def require_floating(tensors: Mapping[str, StoredTensor]) -> None:
    """Reject integer weights: only quantised releases or damaged files have them.

    Raises: ConversionError.
    """
    for name, stored in tensors.items():
        if not stored.dtype.is_floating_point:
            raise ConversionError(f"{stored.file}: {name} has dtype {stored.dtype}; weights must be floating point")


def split_buffers(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Split the tensors into (weights, rotary frequencies)."""
    buffers = {name: tensor for name, tensor in stored.items() if _FREQUENCIES.fullmatch(name)}
    return {name: tensor for name, tensor in stored.items() if name not in buffers}, buffers


def check_frequencies(name: str, found: torch.Tensor, arguments: ModelArguments) -> None:
    """Compare saved rotary frequencies with config.json.

    Raises: ConversionError if they differ: the weights were trained with the saved frequencies.
    """
    sizes = arguments.transformer
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


def split_scales(
    stored: Mapping[str, StoredTensor], block: Block | None, directory: Path
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Split the tensors into (weights, scales by weight name). `block` is the block size in config.json.

    Raises: one ConversionError naming every scale without a weight, weight without scales, scale of another shape or
    dtype, and every float8 tensor that is not block-quantised e4m3.
    """
    # Names decide: a weight and its scales may be in different shards.
    scales = {name: tensor for name, tensor in stored.items() if name.endswith(SCALE_SUFFIX)}
    weights = {name: tensor for name, tensor in stored.items() if name not in scales}
    # Check every combination of weight and scale, and report all problems together.
    quantised = {name for name, tensor in weights.items() if tensor.dtype == FP8}
    problems = [f"{name} is {tensor.dtype}" for name, tensor in weights.items() if tensor.dtype in _OTHER_FLOAT8]
    if (quantised or scales) and block is None:
        names = sorted(quantised or scales)
        problems.append(
            f"{len(names)} FP8 tensors, such as {names[0]}, but config.json has no quantization_config; "
            "it must name their weight_block_size"
        )
    problems += [
        f"{name} has no float8 weight {name.removesuffix(SCALE_SUFFIX)}"
        for name in scales
        if name.removesuffix(SCALE_SUFFIX) not in quantised
    ]
    problems += [
        f"{name} has no {name}{SCALE_SUFFIX}" for name in sorted(quantised) if name + SCALE_SUFFIX not in scales
    ]
    if block is not None:
        for name in sorted(quantised):
            problems += _misfit(name, weights[name], scales.get(name + SCALE_SUFFIX), block)
    if problems:
        raise ConversionError(f"{directory}: FP8 weights and scales do not match: {listing(problems)}")
    return weights, {name: scales[name + SCALE_SUFFIX] for name in sorted(quantised)}


def _misfit(name: str, weight: StoredTensor, scale: StoredTensor | None, block: Block) -> list[str]:
    if len(weight.shape) != 2:
        return [f"{name} {weight.shape} is float8, but not a matrix"]
    if scale is None:
        return []
    if scale.dtype not in _SCALE_DTYPES:
        return [f"{name}{SCALE_SUFFIX} is {scale.dtype}"]
    wanted = scale_shape(weight.shape, block)
    if scale.shape != wanted:
        return [f"{name}{SCALE_SUFFIX} {scale.shape} instead of {wanted} (blocks of {block})"]
    return []
