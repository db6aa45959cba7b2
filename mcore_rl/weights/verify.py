"""Verification of weights: the trainer's tensors against the tensors that an engine's kernels use.

Both sides compute digests of the planned slices: a trainer rank digests the slices of its parameters that it sends, an
engine rank digests the same index ranges of the tensors that its kernels read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.quantization import TensorBox
from mcore_rl.weights.slices.shard_map import Boxes
from model_converters.mapping.transforms import Shape

DIGEST_BYTES = 16
MAX_NAMED = 8
_BLOCK_ELEMENTS = 1 << 22
"""Elements normalised at a time, which bounds the memory of a digest."""


def digest(tensor: torch.Tensor) -> bytes:
    """Compute a digest of shape, dtype and all elements. It does not depend on device and strides.

    The sign of zero does not count, except in codes of quantised weights, which are compared bit for bit.
    """
    found = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=DIGEST_BYTES)
    for block in tensor.detach().reshape(-1).split(_BLOCK_ELEMENTS):
        # Replace -0.0 by 0.0: weights that can only be read back through a product lose the sign of zero.
        block = block + 0 if block.is_floating_point() and block.dtype.itemsize > 1 else block
        found.update(block.cpu().contiguous().view(torch.uint8).numpy())
    return found.digest()


@dataclass
class Comparison:
    """HF names of tensors that differ from the trainer's.

    `differing`: other values. `missing`: sent, but not found in the engine. `unknown`: in the engine, but never sent.
    """

    differing: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)


def compare(
    expected: Sequence[tuple[TensorBox, bytes]], held: Iterable[tuple[str, torch.Tensor]], boxes: Mapping[str, Boxes]
) -> Comparison:
    """Compare an engine rank's tensors with the trainer's digests.

    expected: boxes with the digests that the trainer ranks computed.
    held: the engine rank's parts of HF tensors. A tied tensor occurs several times.
    boxes: the parts of each tensor that this rank keeps, by name.
    """
    by_name: dict[str, list[tuple[TensorBox, bytes]]] = {}
    for each, expected_digest in expected:
        by_name.setdefault(each.hf_name, []).append((each, expected_digest))
    found, seen = Comparison(), set()
    for name, tensor in held:
        if not tensor.numel():
            continue  # this rank's share of the vocabulary is padding only
        seen.add(name)
        if name not in by_name:
            found.unknown.add(name)
        elif not _equal(tensor, boxes[name], by_name[name]):
            found.differing.add(name)
    # Expected, but not read back from the engine.
    found.missing = by_name.keys() - seen
    return found


def _equal(tensor: torch.Tensor, boxes: Boxes, parts: Sequence[tuple[TensorBox, bytes]]) -> bool:
    (start, size), *others = boxes
    dim = next((dim for other, _ in others for dim, first in enumerate(other) if first != start[dim]), 0)
    lengths = [box_size[dim] if box_size else 1 for _, box_size in boxes]
    shape = (*size[:dim], sum(lengths), *size[dim + 1 :]) if size else ()
    if tuple(tensor.shape) != shape:
        return False
    own = tensor.split(lengths, dim) if size else (tensor,)
    return all(any(_holds(part, at, *each) for part, (at, _) in zip(own, boxes, strict=True)) for each in parts)


def _holds(tensor: torch.Tensor, start: Shape, box: TensorBox, expected: bytes) -> bool:
    """Return whether the rank's tensor, which begins at `start` of the whole one, contains a box with this digest."""
    begins = [first - own for first, own in zip(box.first, start, strict=True)]
    ends = [begin + length for begin, length in zip(begins, box.shape, strict=True)]
    if min(begins, default=0) < 0 or any(end > length for end, length in zip(ends, tensor.shape, strict=True)):
        return False
    return digest(tensor[tuple(map(slice, begins, ends))]) == expected


def _some(names: set[str]) -> str:
    first = sorted(names)[:MAX_NAMED]
    return ", ".join([*first, *["..."] * (len(names) > MAX_NAMED)])


def require_equal(ranks: Sequence[Comparison], engine_name: str) -> None:
    """Check the comparisons of all ranks of an engine.

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


def require_planned(recorded: Mapping[str, Boxes], planned: Mapping[str, Boxes], rank: int) -> None:
    """Check that an engine rank keeps the parts of tensors that the plan sends to it.

    The plan is computed without an engine (slices/shard_map.py); `recorded` was observed while the engine's own weight
    loaders ran.

    Raises: WeightSyncError naming the first tensors that differ.
    """
    names = sorted(name for name in planned.keys() | recorded.keys() if planned.get(name) != recorded.get(name))
    if names:
        both = (f"{name}: {_text(recorded.get(name))}, planned {_text(planned.get(name))}" for name in names[:4])
        raise WeightSyncError(
            f"engine rank {rank} keeps other parts of {len(names)} tensors than planned: {'; '.join(both)}"
        )


def _text(boxes: Boxes | None) -> str:
    return "nothing" if boxes is None else " and ".join(f"{list(size)} from {list(start)}" for start, size in boxes)
