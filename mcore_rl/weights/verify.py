"""Certificates: what trainer ranks hold against what an engine computes with, slice by slice.

Both sides digest the slices of the plan: a trainer rank what it would send, from its parameters; an engine rank the
same indices of the tensors that its kernels read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Slice
from mcore_rl.weights.slices.needs import Box

DIGEST_BYTES = 16
MAX_NAMED = 8
_BLOCK_ELEMENTS = 1 << 22
"""Elements normalised at a time, so that a digest needs little memory."""


def digest(tensor: torch.Tensor) -> bytes:
    """Digest of shape, dtype and every element; equal for equal tensors on any device and with any strides."""
    found = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=DIGEST_BYTES)
    for block in tensor.detach().reshape(-1).split(_BLOCK_ELEMENTS):
        # -0.0 becomes 0.0: engines whose weights can only be read through a product cannot tell them apart.
        block = block + 0 if block.is_floating_point() else block
        found.update(block.cpu().contiguous().view(torch.uint8).numpy())
    return found.digest()


@dataclass
class Comparison:
    """HF names of what is not the trainer's: `missing` was sent and is not held, `unknown` the other way round."""

    differing: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)


def compare(
    said: Sequence[tuple[Slice, bytes]], held: Iterable[tuple[str, torch.Tensor]], boxes: Mapping[str, Box]
) -> Comparison:
    """`said`: slices with their digests on trainer ranks. `held`: what an engine rank has of HF tensors, some perhaps
    several times (a tied tensor is); `boxes`: which part of each tensor that is, by name."""
    by_name: dict[str, list[tuple[Slice, bytes]]] = {}
    for each, expected in said:
        by_name.setdefault(each.hf_name, []).append((each, expected))
    found, seen = Comparison(), set()
    for name, tensor in held:
        if not tensor.numel():
            continue  # a rank of which the vocabulary has no rows
        seen.add(name)
        if name not in by_name:
            found.unknown.add(name)
        elif not _equal(tensor, boxes[name], by_name[name]):
            found.differing.add(name)
    found.missing = by_name.keys() - seen
    return found


def _equal(tensor: torch.Tensor, box: Box, slices: Sequence[tuple[Slice, bytes]]) -> bool:
    start, size = box
    if tuple(tensor.shape) != tuple(size):
        return False
    for each, expected in slices:
        part = tensor
        if each.hf_shape:
            part = tensor.narrow(each.dim, each.start - start[each.dim], each.length)
        if digest(part) != expected:
            return False
    return True


def _some(names: set[str]) -> str:
    first = sorted(names)[:MAX_NAMED]
    return ", ".join([*first, *["..."] * (len(names) > MAX_NAMED)])


def require_equal(ranks: Sequence[Comparison], engine_name: str) -> None:
    """`ranks`: what each rank of an engine found.

    Raises: WeightSyncError naming tensors that differ, are missing, or are unknown to the trainer.
    """
    problems = {
        "differ": set().union(*(found.differing for found in ranks)),
        f"are missing from {engine_name}": set().union(*(found.missing for found in ranks)),
        "are unknown to the trainer": set().union(*(found.unknown for found in ranks)),
    }
    messages = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
    if messages:
        raise WeightSyncError(f"weights of {engine_name} are not the trainer's: {'; '.join(messages)}")
