"""Blocks of tensors, against torch's own indexing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from model_converters.chunks import Box, run


@st.composite
def boxes(draw, shape):
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(offset, tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True)))


@given(st.data())
def test_an_overlap_holds_what_both_hold(data):
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
def test_a_moved_block_holds_the_same_elements(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    outer = data.draw(boxes(shape))
    inner = data.draw(boxes(outer.shape)).moved((0,) * len(shape), outer.offset)
    whole = torch.rand(shape)
    assert torch.equal(inner.moved(outer.offset, (0,) * len(shape)).view(outer.view(whole)), inner.view(whole))


def test_a_run_spans_every_other_dimension():
    whole = torch.arange(24).view(2, 3, 4)
    assert torch.equal(run((2, 3, 4), 1, 1, 2).view(whole), whole[:, 1:3])
    assert run((), 0, 0, 1) == Box((), ())
    assert run((), 0, 0, 1).view(torch.tensor(5.0)) == 5
