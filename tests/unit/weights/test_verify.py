"""Digests depend on every element, and comparisons name every tensor that differs."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.messages import Slice
from mcore_rl.weights.slices.shard_map import Boxes, ShardMap
from mcore_rl.weights.verify import Comparison, compare, digest, require_equal, require_planned
from tests.tiny_models import tiny_fields
from tests.unit.weights.test_slices import rows_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_digest_depends_on_elements_order_shape_and_dtype(dtype: torch.dtype) -> None:
    base = torch.arange(24).view(4, 6).to(dtype)
    seen = {digest(base), digest(base.view(6, 4)), digest(base.flip(0)), digest(base.to(torch.float64))}
    for index in range(24):
        changed = base.clone()
        changed.view(-1)[index] += 64
        seen.add(digest(changed))
    assert len(seen) == 4 + 24


def test_digest_ignores_strides_and_sign_of_zero() -> None:
    base = torch.randn(5, 7)
    base[2, 3] = 0.0
    negative = base.clone()
    negative[2, 3] = -0.0
    assert digest(base) == digest(base.t().contiguous().t()) == digest(negative)


def test_digest_large_tensor_includes_last_block() -> None:
    base = torch.zeros((1 << 22) + 3)
    changed = base.clone()
    changed[-1] = 1
    assert digest(base) != digest(changed)


def test_require_equal_lists_tensors_of_all_ranks() -> None:
    require_equal([Comparison(), Comparison()], "engine 1")
    with pytest.raises(WeightSyncError) as caught:
        require_equal([Comparison({"c", "b"}), Comparison({"b"}, {"d"}, {"e"})], "engine 1")
    message = str(caught.value)
    assert "2 differ: b, c" in message
    assert "1 are missing from engine 1: d" in message
    assert "1 are unknown to the trainer: e" in message


def test_compare_slices_at_offset_of_rank_box() -> None:
    """Half of a matrix, sent in two parts, and a scalar."""
    whole = torch.randn(6, 8)
    slices = [Slice("w", (6, 8), torch.float32, 1, start, length, "m", 0, 0) for start, length in ((4, 1), (5, 3))]
    expected = [(each.boxes[0], digest(whole[:, each.start : each.start + each.length])) for each in slices]
    expected.append((Slice("s", (), torch.float32, 0, 0, 1, "n", 0, 0).boxes[0], digest(torch.tensor(2.0))))
    boxes = {"w": (((0, 4), (6, 4)),), "s": (((), ()),)}
    held = {"w": whole[:, 4:].contiguous(), "s": torch.tensor(2.0)}
    assert compare(expected, held.items(), boxes) == Comparison()
    for column in range(4):
        changed = held["w"].clone()
        changed[3, column] += 1
        assert compare(expected, [("w", changed), ("s", held["s"])], boxes) == Comparison({"w"})
    assert compare(expected, [("w", whole[:, :4]), ("s", torch.tensor(3.0))], boxes) == Comparison({"w", "s"})
    assert compare(expected, [("w", whole), ("x", whole)], boxes) == Comparison({"w"}, {"s"}, {"x"})


def test_compare_finds_changes_in_each_of_several_parts() -> None:
    """Rows 2 and 3 of three sections of four rows, as a rank of two keeps them, sent in four parts."""
    whole = torch.randn(12, 5)
    boxes = {"w": tuple(((first, 0), (2, 5)) for first in (2, 6, 10))}
    parts = ((2, 2), (6, 1), (7, 1), (10, 2))
    slices = [Slice("w", (12, 5), torch.float32, 0, start, length, "m", 0, 0) for start, length in parts]
    expected = [(each.boxes[0], digest(whole[each.start : each.start + each.length])) for each in slices]
    held = torch.cat([whole[first : first + 2] for first in (2, 6, 10)])
    assert compare(expected, [("w", held)], boxes) == Comparison()
    for row in range(6):
        changed = held.clone()
        changed[row, 4] += 1
        assert compare(expected, [("w", changed)], boxes) == Comparison({"w"})
    for other in (held[:4], held.roll(2, 0), whole):
        assert compare(expected, [("w", other)], boxes) == Comparison({"w"})


QUERIES = "model.layers.1.self_attn.q_proj.weight"


def planned(rank: int) -> dict[str, Boxes]:
    """Parts of tensors that a rank of an engine with tp=2 keeps."""
    return ShardMap(rows_of(tiny_fields("qwen3_moe")), EngineLayout(tp=2)).boxes(rank)


def test_require_planned_other_boxes_names_tensor_and_rank() -> None:
    for rank in range(2):
        require_planned(planned(rank), planned(rank), rank)
    with pytest.raises(WeightSyncError, match=r"engine rank 1 keeps .*from \[0, 0\], planned .* from \[64, 0\]"):
        require_planned(planned(0), planned(1), 1)
    recorded = planned(0)
    del recorded[QUERIES]
    with pytest.raises(WeightSyncError, match=rf"rank 0 .* 1 tensors .*: {QUERIES}: nothing, planned \[32, 32\]"):
        require_planned(recorded, planned(0), 0)
