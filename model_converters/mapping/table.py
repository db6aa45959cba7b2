"""Rows of a family's weight table, and their binding to exact names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from model_converters.errors import ConversionError, listing
from model_converters.mapping.transforms import Shape, Transform

Axis = Literal["tp", "etp", "none"]
Place = Literal["embedding", "layer", "head", "mtp"]
FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Place of an HF tensor (a part of a row) in a tensor of checkpoints that stack the experts of a layer.

    `name` [num_experts, rows, columns] has one matrix per expert; the part is its rows start, start + step and so on,
    as many as the part has. In a row without experts, `name` [rows, columns] is the matrix. Vectors have no columns.

    rows: rows of the matrix that are stored under `name`, for all parts together.
    transposed: the matrices are stored as [columns, rows]. Shapes cannot show this if both are equal.
    either_way: checkpoints may have the other orientation, too; the shape decides, and square matrices are rejected.
    mxfp4: MXFP4 releases store codes `<name>_blocks` [num_experts, rows, columns / 32, 16] and exponents
    `<name>_scales` [num_experts, rows, columns / 32] instead, never transposed.
    """

    name: str
    rows: int
    start: int = 0
    step: int = 1
    transposed: bool = False
    either_way: bool = False
    mxfp4: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the weight table, used for loading and export.

    mcore, hf: names. The placeholders `{l}` and `{e}` are bound to the global layers in `layers` and to
    range(num_experts).
    shapes: shapes of the whole HF tensors.
    axis: parallel axis that divides `dim`; "none": every rank of the stage holds the whole tensor.
    split_by: key of config.json with the number of divided units, for error messages.
    copy_of_embedding: marks the head of a model with tied embeddings. With several pipeline stages the last one has its
    own copy, which is loaded but never exported.
    redundant: optional HF names in a checkpoint that must have the same values.
    fp8: whether FP8 releases quantise this weight.
    whole_in_engines: every rank of an inference engine holds the whole tensor, although `axis` divides it here.
    repeats: HF tensor that this row's HF tensor must equal. Two rows then share one mcore tensor: it is loaded through
    either row and exported to both. A checkpoint may lack this row's HF tensor (see mtp.resolve_copies).
    stored: place of each HF tensor in checkpoints that contain the named tensors instead; () if there are none. The
    index of a checkpoint decides (see hf/stacked.py). The names have the placeholder `{l}`.
    stacked_release: whether exports contain the tensors of `stored`, as releases do.
    """

    mcore: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    transform: Transform
    axis: Axis = "none"
    dim: int = 0
    split_by: str = ""
    place: Place = "layer"
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    dtype: torch.dtype | None = None
    copy_of_embedding: bool = False
    redundant: tuple[str, ...] = ()
    fp8: bool = False
    whole_in_engines: bool = False
    repeats: str = ""
    stored: tuple[Stored, ...] = ()
    stacked_release: bool = False


@dataclass(frozen=True, slots=True)
class BoundRow:
    """A row with exact names. `group` is "embedding", "layer.<l>", "head" or "mtp"; `dtype` is the HF dtype."""

    row: Row
    mcore: str
    hf: tuple[str, ...]
    dtype: torch.dtype
    group: str
    layer: int | None
    expert: int | None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """An HF tensor `part` of a bound row, and its place in a stacked tensor `name`, of `shape`, of a checkpoint."""

    part: str
    part_shape: Shape
    name: str
    shape: Shape
    expert: int | None
    place: Stored


def stored_parts(bound: BoundRow) -> list[StoredPart]:
    """Return the places of a row's HF tensors in a checkpoint with stacked experts; [] if the row declares none."""
    parts = []
    for name, shape, place in zip(bound.hf, bound.row.shapes, bound.row.stored, strict=bool(bound.row.stored)):
        matrix = (place.rows, *shape[1:])
        whole = matrix[::-1] if place.transposed else matrix
        if bound.expert is not None:
            whole = (bound.row.num_experts, *whole)
        stacked = _fill(place.name, bound.layer, None)
        parts.append(StoredPart(name, shape, stacked, whole, bound.expert, place))
    return parts


def exported_parts(bound: BoundRow) -> list[StoredPart | None]:
    """Return the place of each HF tensor of a row in the stacked tensors of exports; None if it is exported itself."""
    return [*stored_parts(bound)] if bound.row.stacked_release else [None] * len(bound.hf)


def is_parameter(bound: BoundRow) -> bool:
    """Return False for buffers: the expert bias of a router has no gradient and no optimizer state."""
    return not bound.mcore.endswith(("expert_bias", "e_score_correction_bias"))


def is_sharded(bound: BoundRow) -> bool:
    """Return False for tensors that every data-parallel rank has whole, also with sharded parameters: buffers, and the
    adapters of a LoRA run."""
    return is_parameter(bound) and ".adapter." not in bound.mcore


def bind(rows: Sequence[Row], hf_config: Mapping[str, object], dtype: torch.dtype) -> list[BoundRow]:
    """Bind all placeholders. Rows are ordered by group: embedding, layers, head, multi-token prediction.

    Raises: ConversionError listing every name that two rows claim and every layer that the model does not have.
    """
    num_layers = hf_config["num_hidden_layers"]
    assert isinstance(num_layers, int)  # the family's rows are built from it
    # A row applies to several layers; sort the bound rows by group, so that the tensors of one layer are consecutive.
    parts: dict[str, list[BoundRow]] = {
        "embedding": [],
        **{f"layer.{layer}": [] for layer in range(num_layers)},
        "head": [],
        "mtp": [],
    }
    problems = []
    for row in rows:
        outside = [layer for layer in row.layers if not 0 <= layer < num_layers]
        if outside:
            problems.append(f"{row.mcore} is bound to layers {outside} of {num_layers}")
            continue
        for bound in _bindings(row, dtype):
            parts[bound.group].append(bound)
    bound_rows = [bound for group in parts.values() for bound in group]
    problems += _claimed_twice(bound_rows)
    if problems:
        raise ConversionError(f"weight table of {hf_config.get('model_type')}: {listing(problems)}")
    return bound_rows


def _bindings(row: Row, dtype: torch.dtype) -> list[BoundRow]:
    layers: Sequence[int | None] = row.layers if row.place == "layer" else (None,)
    experts: Sequence[int | None] = range(row.num_experts) if row.num_experts else (None,)
    kept = row.dtype or dtype
    bindings = []
    for layer in layers:
        group = row.place if layer is None else f"layer.{layer}"
        for expert in experts:
            names = [_fill(name, layer, expert) for name in (row.mcore, *row.hf)]
            bindings.append(BoundRow(row, names[0], tuple(names[1:]), kept, group, layer, expert))
    return bindings


def _fill(name: str, layer: int | None, expert: int | None) -> str:
    return name.replace("{l}", str(layer)).replace("{e}", str(expert))


def _claimed_twice(bound_rows: Sequence[BoundRow]) -> list[str]:
    owners: dict[str, str] = {}
    problems = []
    for bound in bound_rows:
        # A tied head shares its HF name with the embedding, and an MTP copy shares its mcore tensor with another row.
        hf_names = () if bound.row.copy_of_embedding else bound.hf
        mcore_names = () if bound.row.repeats else (bound.mcore,)
        for name in (*(f"mcore {name}" for name in mcore_names), *(f"HF {name}" for name in hf_names)):
            if name in owners:
                problems.append(f"{name} is claimed by {owners[name]} and {bound.row.mcore}")
            owners[name] = bound.row.mcore
    return problems
