"""Rows of gated MLPs: dense ones, and one per expert."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from model_converters.families.parts.hf_config import HFConfig, integer
from model_converters.mapping.table import Axis, Row, Stored
from model_converters.mapping.transforms import GateUp, Same


def mlp_rows(config: HFConfig, layers: Sequence[int]) -> list[Row]:
    """Return the rows of a dense gated MLP; none without layers."""
    if not layers:
        return []
    hidden, intermediate = integer(config, "hidden_size"), integer(config, "intermediate_size")
    prefixes = ("decoder.layers.{l}.mlp.", "model.layers.{l}.mlp.")
    return gated_rows(prefixes, hidden, intermediate, layers, split_by="intermediate_size")


PARTS = ("gate_proj", "up_proj", "down_proj")
"""Usual HF names of a gated MLP's projections."""


def gated_rows(
    prefixes: tuple[str, str],
    hidden: int,
    intermediate: int,
    layers: Sequence[int],
    *,
    split_by: str,
    parts: tuple[str, str, str] = PARTS,
    num_experts: int = 0,
    stored: tuple[Stored, ...] = (),
) -> list[Row]:
    """Return the rows of a gated MLP, or of one per expert, under (mcore, HF) prefixes. `stored`: see Row; the places
    of gate, up and down projection."""
    mcore, hf = prefixes
    gate, up, down = (f"{hf}{part}.weight" for part in parts)
    wide, narrow = (intermediate, hidden), (hidden, intermediate)
    axis: Axis = "etp" if num_experts else "tp"
    suffix = "{e}" if num_experts else ""
    row = partial(Row, axis=axis, split_by=split_by, layers=tuple(layers), num_experts=num_experts, fp8=True)
    return [
        row(
            mcore=f"{mcore}linear_fc1.weight{suffix}",
            hf=(gate, up),
            shapes=(wide, wide),
            transform=GateUp(),
            stored=stored[:2],
        ),
        # Row-parallel: its columns are divided like the rows of gate and up.
        row(
            mcore=f"{mcore}linear_fc2.weight{suffix}",
            hf=(down,),
            shapes=(narrow,),
            transform=Same(),
            dim=1,
            stored=stored[2:],
        ),
    ]
