"""Slices of a trainer rank's own tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Slice


def part_of(each: Slice, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Return a view of a slice in this rank's tensors. `shape` is the slice's shape.

    Raises: WeightSyncError for a missing tensor or a shape that differs from the plan.
    """
    tensor = tensors.get(each.mcore_name)
    if tensor is None:
        raise WeightSyncError(f"this rank has no {each.mcore_name}, which contains its slice of {each.hf_name}")
    part = tensor
    if each.hf_shape and part.dim() > each.dim and each.local_start + each.length <= part.shape[each.dim]:
        part = part.narrow(each.dim, each.local_start, each.length)
    if part.shape != shape:
        raise WeightSyncError(
            f"{each.mcore_name} {tuple(tensor.shape)} has no slice of shape {each.shape} from {each.local_start} of "
            f"dim {each.dim} for {each.hf_name}"
        )
    return part
