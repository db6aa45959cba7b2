"""Transforms distribute every element to exactly one shard, in Megatron's order, for random sizes."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from model_converters.mapping.transforms import GateUp, GroupedQKV, Same, Section, Sections, Vocabulary

sizes = st.integers(1, 6)


@st.composite
def cases(draw):
    """Draw (transform, whole HF tensors, dim, num_shards)."""
    kinds = ["same", "vocabulary", "gate_up", "qkv", "gated_qkv", "sections"]
    kind, dim, num_shards = draw(st.sampled_from(kinds)), draw(st.integers(0, 1)), 1
    if kind in ("qkv", "gated_qkv"):
        groups, heads, width = draw(sizes), draw(sizes), draw(sizes)
        queries = groups * heads * width * (2 if kind == "gated_qkv" else 1)
        lengths = [queries, groups * width, groups * width]
        transform = GroupedQKV(groups, gated=kind == "gated_qkv")
    elif kind == "sections":
        transform, lengths = draw(sectioned())
    else:
        lengths = [draw(st.integers(1, 24))] * (2 if kind == "gate_up" else 1)
        transform = {"same": Same, "vocabulary": Vocabulary, "gate_up": GateUp}[kind]()
    num_shards = draw(st.integers(1, 8))
    parts = [torch.arange(length) + 1000 * (number + 1) for number, length in enumerate(lengths)]
    other = draw(st.integers(1, 3))
    shaped = [torch.stack([part] * other, dim=1 - dim) for part in parts]
    return transform, shaped, dim, num_shards


@st.composite
def sectioned(draw):
    """Draw Sections over two HF tensors, of `units` units each, and the lengths of these tensors.

    The first one consists of one block, or of one block per unit. Its blocks contain three sections.
    """
    units, blocks = draw(sizes), draw(st.booleans())
    lengths = [draw(sizes) * (1 if blocks else units) for _ in range(3)]
    starts = [0, lengths[0], lengths[0] + lengths[1]]
    num_blocks = units if blocks else 1
    first = [Section(0, num_blocks, start, length) for start, length in zip(starts, lengths, strict=True)]
    order = draw(st.permutations([*first, Section(1)]))
    return Sections(tuple(order), units), [num_blocks * sum(lengths), units * draw(sizes)]


def indices(section, length):
    """Return the indices of a section in an HF tensor, counted one by one."""
    block = length // section.num_blocks
    end = section.start + section.length if section.length else block
    return [index for index in range(length) if section.start <= index % block < end]


def whole(transform, parts, dim, shard, num_shards):
    """Return the tensor of one Megatron rank, by chunking whole tensors."""
    if isinstance(transform, GateUp):
        return torch.cat([part.chunk(num_shards, dim)[shard] for part in parts], dim)
    if isinstance(transform, Sections):
        sections = [(parts[s.part], indices(s, parts[s.part].shape[dim])) for s in transform.sections]
        chosen = [part.index_select(dim, torch.tensor(rows)) for part, rows in sections]
        return torch.cat([section.chunk(num_shards, dim)[shard] for section in chosen], dim)
    if isinstance(transform, GroupedQKV) and transform.gated:
        # Per head, HF has [query; gate]: the first and the second half of its indices.
        heads = parts[0].chunk(transform.num_heads([part.shape for part in parts], dim), dim)
        halves = [torch.cat([head.chunk(2, dim)[half] for head in heads], dim) for half in (0, 1)]
        parts = [*halves, *parts[1:]]
    if isinstance(transform, GroupedQKV):
        groups = [part.chunk(transform.num_groups, dim) for part in parts]
        fused = torch.cat([part[group] for group in range(transform.num_groups) for part in groups], dim)
        return fused.chunk(num_shards, dim)[shard]
    padded = parts[0]
    while padded.shape[dim] % num_shards:
        padded = torch.cat([padded, torch.zeros_like(padded.narrow(dim, 0, 1))], dim)
    return padded.chunk(num_shards, dim)[shard]


@given(cases())
def test_segments_match_layout_of_megatron(case):
    transform, parts, dim, num_shards = case
    shapes = tuple(tuple(part.shape) for part in parts)
    assume(not transform.refusal(shapes, dim, num_shards))
    back = [torch.full_like(part, -1) for part in parts]
    for shard in range(num_shards):
        wanted = whole(transform, parts, dim, shard, num_shards)
        local = torch.zeros_like(wanted)
        assert wanted.shape[dim] == transform.local_length(shapes, dim, num_shards)
        for part, start, local_start, length in transform.segments(shapes, dim, shard, num_shards):
            source, target = parts[part].narrow(dim, start, length), back[part].narrow(dim, start, length)
            local.narrow(dim, local_start, length).copy_(source)
            assert (target == -1).all()
            target.copy_(wanted.narrow(dim, local_start, length))
        assert torch.equal(local, wanted)
    for part, original in zip(back, parts, strict=True):
        assert torch.equal(part, original)


def test_sections_of_delta_net_are_divided_by_key_heads():
    """Two key heads with [q, k, v, v] of two rows each; on two shards, each section has one head."""
    heads = [Section(0, 2, 0, 2), Section(0, 2, 2, 2), Section(0, 2, 4, 4)]
    segments = Sections(tuple(heads), 2).segments(((16, 3),), 0, 1, 2)
    assert segments == ((0, 8, 0, 2), (0, 10, 2, 2), (0, 12, 4, 4))
    assert "2 is not a multiple of {axis} 4" in Sections(tuple(heads), 2).refusal(((16, 3),), 0, 4)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12))
def test_grouped_qkv_refusal_only_for_impossible_shards(groups, heads, num_shards):
    """Megatron requires that key-value heads divide the ranks or vice versa; then shards consist of whole rows."""
    transform = GroupedQKV(groups)
    shapes = ((groups * heads * 12, 2), (groups * 12, 2), (groups * 12, 2))
    refusal = transform.refusal(shapes, 0, num_shards)
    related = groups % num_shards == 0 or num_shards % groups == 0
    assert bool(refusal) == (not related or (groups * (heads + 2) * 12) % num_shards != 0)
    if refusal:
        assert str(num_shards) in refusal
