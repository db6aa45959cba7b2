"""Weight table of a trainer that holds the tensors of HF checkpoints, instead of Megatron's fused tensors.

Every row of a family's table becomes one row per HF tensor, under the tensor's own name:

| Megatron-Core | Hugging Face |
|---|---|
| `model.layers.{l}.self_attn.q_proj.weight` | the same |
| `model.layers.{l}.self_attn.k_proj.weight` | the same |
| `model.layers.{l}.mlp.gate_proj.weight` | the same |
| `model.layers.{l}.mlp.experts.{e}.gate_proj.weight` | the same |

Engines divide heads, so rows of projections keep the number of their heads. The tensors of experts are views of
parameters that stack all experts of a layer, so a data-parallel rank has whole experts (see Placement).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import GroupedQKV, Heads, KeyValueHeads, Same, Sections, Transform


def trainer_rows(rows: Sequence[Row], layout: TrainLayout) -> list[Row]:
    """Return the table of the tensors that the ranks of `layout` hold; `rows` is the family's table."""
    return separate_rows(rows) if layout.hf_tensors else list(rows)


def separate_rows(rows: Sequence[Row]) -> list[Row]:
    """Return one row per HF tensor. Its name replaces Megatron's."""
    return [
        # No rank holds a tied head, whose HF name is the embedding's.
        replace(
            row,
            mcore=row.mcore if row.copy_of_embedding else name,
            hf=(name,),
            shapes=(shape,),
            transform=transform,
            stored=row.stored[part : part + 1],
        )
        for row in rows
        for part, (name, shape, transform) in enumerate(zip(row.hf, row.shapes, _transforms(row), strict=True))
    ]


def _transforms(row: Row) -> list[Transform]:
    """Return the transform of each HF tensor of a row."""
    transform = row.transform
    if isinstance(transform, GroupedQKV):
        heads = KeyValueHeads(num_heads=transform.num_groups)
        return [Heads(num_heads=transform.num_heads(row.shapes, row.dim)), heads, heads]
    if isinstance(transform, Sections):
        whole: Transform = Heads(num_heads=transform.num_units) if transform.num_units else Same()
        return [whole] * transform.num_parts
    assert len(row.hf) == 1, f"{row.mcore} consists of several tensors"
    return [transform]
