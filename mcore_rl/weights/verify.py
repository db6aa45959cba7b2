"""Certificates: what the trainer wrote against what an engine computes with, tensor by tensor.

Both sides digest whole HF tensors by name. The trainer's digests are taken from the buckets after every rank has
written them, so they cover the conversion; an engine's are taken from the tensors that its kernels read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.transports.shared_memory import SharedBuckets

_BLOCK_ELEMENTS = 1 << 22
"""Elements normalised at a time, so that a digest needs little memory."""


class Digest:
    """Digest of one tensor whose rows of dim 0 may come in several parts, in order."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._hash = hashlib.blake2b(f"{dtype} {list(shape)}".encode(), digest_size=16)

    def update(self, rows: torch.Tensor) -> None:
        flat = rows.detach().reshape(-1)
        for block in flat.split(_BLOCK_ELEMENTS):
            # -0.0 becomes 0.0: engines whose weights can only be read through a product cannot tell them apart.
            block = block + 0 if block.is_floating_point() else block
            self._hash.update(block.cpu().contiguous().view(torch.uint8).numpy())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def digest(tensor: torch.Tensor) -> str:
    """Digest of shape, dtype and every element; equal for equal tensors on any device and with any strides."""
    whole = Digest(tuple(tensor.shape), tensor.dtype)
    whole.update(tensor)
    return whole.hexdigest()


class BucketDigests:
    """Digests of all tensors of a hand-over, taken bucket after bucket while the writers go through the plan."""

    def __init__(self, buckets: SharedBuckets) -> None:
        self._buckets = buckets
        self._digests: dict[str, str] = {}
        self._partial: Digest | None = None
        self._next = 0

    def add(self, index: int) -> None:
        """Reads bucket `index`; every rank must have written it.

        Raises: WeightSyncError when it is not this bucket's turn.
        """
        if index != self._next:
            raise WeightSyncError(f"bucket {index} to digest came where bucket {self._next} was due")
        self._next += 1
        for entry in self._buckets.spec.buckets[index]:
            if entry.first_row == 0:
                self._partial = Digest(entry.shape, entry.dtype)
            assert self._partial is not None  # entries of one tensor follow each other
            self._partial.update(self._buckets.view(index, entry))
            if entry.last:
                self._digests[entry.name] = self._partial.hexdigest()

    def result(self) -> dict[str, str]:
        """Digest by HF name.

        Raises: WeightSyncError when buckets are missing.
        """
        if self._next != self._buckets.spec.num_buckets:
            raise WeightSyncError(f"only {self._next} of {self._buckets.spec.num_buckets} buckets were digested")
        return self._digests


def compare(trainer: Mapping[str, str], engine: Mapping[str, str], engine_name: str = "the engine") -> int:
    """Compares digests by HF name; returns how many were compared.

    Raises: WeightSyncError naming every tensor that differs, is missing, or is unknown to the trainer.
    """
    problems = {
        "differ": sorted(name for name in trainer.keys() & engine.keys() if trainer[name] != engine[name]),
        f"are missing from {engine_name}": sorted(trainer.keys() - engine.keys()),
        "are unknown to the trainer": sorted(engine.keys() - trainer.keys()),
    }
    messages = [f"{len(names)} {what}: {', '.join(names)}" for what, names in problems.items() if names]
    if messages:
        raise WeightSyncError(
            f"weights of {engine_name} are not the trainer's ({len(trainer)} tensors): {'; '.join(messages)}"
        )
    return len(trainer)
