"""Checkpoints that store all experts of a layer in one tensor, read as the table's tensors of single experts.

| written by | `mlp.experts.gate_up_proj` | `mlp.experts.down_proj` |
|---|---|---|
| save_pretrained(save_original_format=False), transformers 5 | [E, 2 I, h]: gate, then up | [E, h, I] |

E experts with I units and hidden size h. The table declares these tensors (Row.stored), and the index of a checkpoint
decides, layer by layer: config.json does not show how experts are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from model_converters.errors import ConversionError, listing
from model_converters.hf.shards import StoredTensor
from model_converters.mapping.table import BoundRow, StoredPart, stored_parts

# Tensors of single experts have a number here.
_STACKED = re.compile(r"\.experts\.(?!\d)")


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Return whether some tensors contain all experts of a layer."""
    return any(_STACKED.search(name) for name in names)


def unstack(listed: Mapping[str, StoredTensor], bound: Sequence[BoundRow]) -> dict[str, StoredTensor]:
    """Replace each stacked tensor that the rows declare by its parts. Parts are ranges of the same bytes.

    Raises: ConversionError naming tensors of another shape, and parts that the checkpoint also contains under their own
    name.
    """
    parts = [part for row in bound for part in stored_parts(row) if part.name in listed]
    problems = [f"{part.part} is stored twice: also in {part.name}" for part in parts if part.part in listed]
    wanted = {part.name: part.shape for part in parts}
    problems += [
        f"{name} is {listed[name].shape} instead of {shape}"
        for name, shape in wanted.items()
        if listed[name].shape != shape
    ]
    if problems:
        raise ConversionError(f"experts stored as one tensor per layer: {listing(problems)}")
    kept = {name: stored for name, stored in listed.items() if name not in wanted}
    return kept | {part.part: _range(listed[part.name], part) for part in parts}


def _range(stored: StoredTensor, part: StoredPart) -> StoredTensor:
    """Return the location of a part whose rows are contiguous in the file."""
    assert part.place.step == 1, f"{part.part} is not contiguous"
    assert not part.place.transposed, f"{part.part} is not contiguous"
    row_bytes = prod(part.part_shape[1:]) * stored.dtype.itemsize
    first = part.place.rows * (part.expert or 0) + part.place.start
    num_bytes = part.part_shape[0] * row_bytes
    return stored._replace(shape=part.part_shape, offset=stored.offset + first * row_bytes, num_bytes=num_bytes)
