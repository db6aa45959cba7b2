"""Weights that an engine's kernels use, read back module by module as parts of HF tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from mcore_rl.config.quantization import BLOCK
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.engine_rows import FUSED_MODULES

SCALES = "weight_scale_inv"
"""Parameter of a linear module with the scales of its FP8 codes."""

Held = tuple[str, torch.Tensor]
"""Name of an HF tensor, and the part of it that this rank holds."""
Reader = tuple[type, type, Callable[[torch.nn.Module, str], Iterable[Held]]]
"""Type of a module, type of its quant_method, and the function that reads such a module under a name."""


def modules_with_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """List the modules that own parameters, by name."""
    modules = model.named_modules()
    return [(name, module) for name, module in modules if any(True for _ in module.parameters(recurse=False))]


def read_module(module: torch.nn.Module, name: str, readers: Iterable[Reader]) -> Iterable[Held]:
    """Read the weights of a module with the reader of its type. Parameters of modules without quant_method are read as
    they are.

    Raises: WeightSyncError for a module whose memory layout is unknown.
    """
    method = getattr(module, "quant_method", None)
    for kind, layout, read in readers:
        if isinstance(module, kind) and isinstance(method, layout):
            return read(module, name)
    if method is not None:
        raise unknown_layout(name, type(method).__name__)
    return [(f"{name}.{key}", parameter.detach()) for key, parameter in module.named_parameters(recurse=False)]


def linear_parts(
    module: torch.nn.Module, name: str, weight: torch.Tensor, scales: torch.Tensor | None = None
) -> Iterator[Held]:
    """Split the unpacked weight and the bias of a linear module into HF tensors; with `scales`, the weight has FP8
    codes.

    Raises: WeightSyncError for an unknown fused module.
    """
    prefix, _, last = name.rpartition(".")
    # Modules whose rows are not divided have output_size only.
    sizes: Sequence[int] = getattr(module, "output_partition_sizes", None) or [module.output_size]
    parts: Sequence[str] = FUSED_MODULES.get(last, ()) if len(sizes) > 1 else (last,)
    if len(parts) != len(sizes):
        raise WeightSyncError(f"{name}: {type(module).__name__} of {len(sizes)} parts has no entry in FUSED_MODULES")
    parts, sizes = _joined(parts, sizes)
    for key, parameter in module.named_parameters(recurse=False):
        if key not in ("weight", "bias", SCALES):  # the correction bias of a router
            yield f"{name}.{key}", parameter.detach()
    bias = getattr(module, "bias", None)
    if bias is not None and scales is None:
        bias = bias.to(weight.dtype)  # kernels may keep it in float32
    blocks = [-(-size // BLOCK) for size in sizes]
    for key, fused, lengths in (("weight", weight, sizes), (SCALES, scales, blocks), ("bias", bias, sizes)):
        if fused is not None:
            pieces = fused.detach().split(lengths, dim=0)
            yield from ((f"{prefix}.{part}.{key}", piece) for part, piece in zip(parts, pieces, strict=True))


def _joined(parts: Sequence[str], sizes: Sequence[int]) -> tuple[list[str], list[int]]:
    """Join consecutive parts of the same name."""
    names = list(dict.fromkeys(parts))
    return names, [sum(size for part, size in zip(parts, sizes, strict=True) if part == name) for name in names]


def unknown_layout(name: str, what: str) -> WeightSyncError:
    return WeightSyncError(f"{name}: the layout of {what} is unknown; set weights.verify_every to 0")
