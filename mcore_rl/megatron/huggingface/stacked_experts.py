"""Tensors of HF checkpoints in the parameters of transformers' models.

transformers 5 stacks the experts of a layer, which are separate tensors in checkpoints and engines, and it has one name
for the block with experts of all families. E experts with I units and hidden size h:

| parameter or buffer of the model | tensors of the checkpoint |
|---|---|
| `mlp.experts.gate_up_proj` [E, 2 I, h] | gate and up projection of every expert, [I, h] each |
| `mlp.experts.down_proj` [E, h, I] | down projection of every expert, [h, I] |
| `mlp.gate.weight` [E, h] | the router (`block_sparse_moe.gate.weight` in Mixtral) |
| `mlp.gate.expert_bias` [E] | `mlp.gate.e_score_correction_bias`, or another name and shape of the family's table |

All others have the names of the checkpoint. Rows [first, end) of a stacked parameter are whole experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from model_converters.dcp.blocks import Box
from model_converters.mapping.table import BoundRow, stored_parts
from model_converters.mapping.transforms import Shape

_BIAS = re.compile(r"decoder\.(layers\.\d+\.mlp)\.router\.expert_bias")


class HFPart(NamedTuple):
    """Tensor of an HF checkpoint: `shape[0]` rows from `start` of an expert's matrix in a stacked parameter, or a whole
    parameter if `expert` is None."""

    hf_name: str
    shape: Shape
    expert: int | None = None
    start: int = 0

    def inside(self, box: Box) -> Box:
        """Return the position in the whole parameter of a block of the HF tensor."""
        if self.expert is None:
            return box
        row, *rest = box.offset
        return Box((self.expert, self.start + row, *rest), (1, *box.shape))


def hf_parts(bound: Iterable[BoundRow]) -> dict[str, list[HFPart]]:
    """Return the HF tensors of every parameter and router bias by its name in the model; `bound` is the family's
    table, whose stored places of experts are their places in these models."""
    parts: dict[str, list[HFPart]] = {}
    for row in bound:
        # A tied head has no tensor of its own.
        if row.row.copy_of_embedding:
            continue
        for part in stored_parts(row):
            parts.setdefault(part.name, []).append(HFPart(part.part, part.part_shape, part.expert, part.place.start))
        if not row.row.stored:
            bias = _BIAS.fullmatch(row.mcore)
            for hf_name, shape in zip(row.hf, row.row.shapes, strict=True):
                parts[f"model.{bias[1]}.gate.expert_bias" if bias else hf_name] = [HFPart(hf_name, shape)]
    return parts


def views(parts: Iterable[HFPart], tensor: torch.Tensor, first: int) -> Mapping[str, torch.Tensor]:
    """Return the HF tensors in `tensor`, the rows from `first` on of a parameter, as views by name. Experts of other
    ranks are left out."""
    found = {}
    for part in parts:
        if part.expert is None:
            found[part.hf_name] = tensor
        elif first <= part.expert < first + len(tensor):
            found[part.hf_name] = tensor[part.expert - first].narrow(0, part.start, part.shape[0])
    return found
