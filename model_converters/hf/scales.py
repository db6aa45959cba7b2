"""Assignment of FP8 scales to their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from model_converters.errors import ConversionError, listing
from model_converters.hf.quant import FP8, SCALE_SUFFIX, Block, scale_shape
from model_converters.hf.shards import StoredTensor

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_OTHER_FLOAT8 = (torch.float8_e5m2, torch.float8_e8m0fnu)


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
    return weights, {name: scales[name + SCALE_SUFFIX] for name in quantised}


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
