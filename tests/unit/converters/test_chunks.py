"""Blocks of tensors, compared with torch's indexing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_converters.dcp.blocks import Box, flat_index, range_boxes, slice_box


@st.composite
def boxes(draw, shape):
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(offset, tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True)))


@given(st.data())
def test_box_overlap_equals_common_elements(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    first, second = data.draw(boxes(shape)), data.draw(boxes(shape))
    covered = torch.zeros(2, *shape)
    first.view(covered[0]).fill_(1)
    second.view(covered[1]).fill_(1)
    both = covered.prod(0)
    common = first.overlap(second)
    assert common == second.overlap(first)
    if common is None:
        assert not both.any()
        return
    assert common.view(both).all()
    assert common.volume == int(both.sum())


@given(st.data())
def test_box_moved_selects_same_elements(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    outer = data.draw(boxes(shape))
    inner = data.draw(boxes(outer.shape)).moved((0,) * len(shape), outer.offset)
    whole = torch.rand(shape)
    assert torch.equal(inner.moved(outer.offset, (0,) * len(shape)).view(outer.view(whole)), inner.view(whole))


def test_slice_box_spans_all_other_dimensions():
    whole = torch.arange(24).view(2, 3, 4)
    assert torch.equal(slice_box((2, 3, 4), 1, 1, 2).view(whole), whole[:, 1:3])
    assert slice_box((), 0, 0, 1) == Box((), ())
    assert slice_box((), 0, 0, 1).view(torch.tensor(5.0)) == 5


@pytest.mark.parametrize("shape", [(), (7,), (4, 3), (1, 5), (3, 1), (2, 3, 4), (3, 1, 2, 2)])
def test_range_boxes_tile_flat_range_in_order(shape):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = range_boxes(shape, start, stop)
            parts = [box.view(whole).flatten() for box in boxes]
            found = torch.cat(parts) if parts else torch.empty(0)
            assert found.tolist() == list(range(start, stop))
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            assert all(flat_index(shape, box.offset) == part[0] for box, part in zip(boxes, parts, strict=True))


def test_box_of_view_finds_block_in_buffer_slice():
    whole = torch.arange(100.0)[10:34].view(4, 6)
    for box in (Box((0, 0), (4, 6)), Box((2, 0), (2, 6)), Box((1, 2), (2, 3))):
        assert Box.of_view(box.view(whole), whole) == box
