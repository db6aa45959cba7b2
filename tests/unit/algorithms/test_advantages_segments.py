"""Numbering of groups, compared with numpy, also for ids that collide in the hash table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.kernels import GOLDEN_RATIO
from mcore_rl.algorithms.segments import Segments

RANDOM = np.random.default_rng(0)
COLLIDING = np.arange(500, dtype=np.uint64) * np.uint64(pow(int(GOLDEN_RATIO), -1, 2**64))  # hashes 0, 1, 2, ...


@pytest.mark.parametrize(
    "ids",
    [
        RANDOM.integers(-(2**63), 2**63 - 1, 3000),
        RANDOM.integers(-20, 20, 500),
        np.repeat(np.arange(100)[::-1], 7),
        RANDOM.permutation(np.tile(COLLIDING.view(np.int64), 3)),
        np.arange(0, 2**40, 2**31),
        np.array([-(2**63), 2**63 - 1, 0, -1, 0]),
        np.zeros(0, np.int64),
    ],
    ids=["distinct", "few", "runs", "colliding", "strided", "extreme", "empty"],
)
def test_segments_match_numpy_unique(ids):
    groups = Segments.of(torch.from_numpy(ids))
    _, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    pairs = set(zip(groups.index.tolist(), inverse.tolist(), strict=True))
    assert len(pairs) == len(sizes) == len(groups.sizes)  # one to one
    assert sorted(groups.sizes.tolist()) == sorted(sizes.tolist())
    assert torch.equal(torch.bincount(groups.index, minlength=len(sizes)), groups.sizes)


def test_segments_accept_int32_and_strided_ids():
    ids = torch.tensor([[5, 0], [7, 0], [5, 0]])
    assert Segments.of(ids[:, 0]).index.tolist() == [0, 1, 0]
    assert Segments.of(ids[:, 0].int()).index.tolist() == [0, 1, 0]
