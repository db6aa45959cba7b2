"""Digests see every element, and comparisons name every tensor."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.verify import compare, digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_digest_depends_on_every_element_its_place_the_shape_and_the_dtype(dtype: torch.dtype) -> None:
    base = torch.arange(24).view(4, 6).to(dtype)
    seen = {digest(base), digest(base.view(6, 4)), digest(base.flip(0)), digest(base.to(torch.float64))}
    for index in range(24):
        changed = base.clone()
        changed.view(-1)[index] += 64
        seen.add(digest(changed))
    assert len(seen) == 4 + 24


def test_a_digest_does_not_depend_on_strides_or_the_sign_of_zero() -> None:
    base = torch.randn(5, 7)
    base[2, 3] = 0.0
    negative = base.clone()
    negative[2, 3] = -0.0
    assert digest(base) == digest(base.t().contiguous().t()) == digest(negative)


def test_tensors_larger_than_one_block_are_digested_to_their_end() -> None:
    base = torch.zeros((1 << 22) + 3)
    changed = base.clone()
    changed[-1] = 1
    assert digest(base) != digest(changed)


def test_a_comparison_names_everything_that_is_wrong() -> None:
    trainer = {"a": "1", "b": "2", "c": "3", "d": "4"}
    assert compare(trainer, dict(trainer)) == 4
    with pytest.raises(WeightSyncError) as caught:
        compare(trainer, {"a": "1", "b": "x", "c": "y", "e": "5"}, "engine 1")
    message = str(caught.value)
    assert "2 differ: b, c" in message
    assert "1 are missing from engine 1: d" in message
    assert "1 are unknown to the trainer: e" in message
