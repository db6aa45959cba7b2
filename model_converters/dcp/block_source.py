"""Chunks of a Megatron checkpoint, composed of slices of HF tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from model_converters.dcp.blocks import Box, CheckpointChunk, ShardedRankState, slice_box
from model_converters.errors import ConversionError, listing
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.placement import Piece
from model_converters.mapping.plan import TensorLoad
from model_converters.mapping.table import BoundRow


def read_chunk(
    source: HFCheckpoint,
    loads: Mapping[str, TensorLoad],
    dtypes: Mapping[str, torch.dtype],
    chunk: CheckpointChunk,
) -> torch.Tensor:
    """Read a chunk into a new tensor; padding is zero.

    loads: plan of the rank's tensors. dtypes: dtype of each of them. Both by mcore name.

    Raises: ConversionError.
    """
    load = loads[chunk.mcore_name]
    slices = []
    for hf_name, piece in load.sources:
        planned = slice_box(load.shape, piece.dim, piece.local_start, piece.length)
        if (common := planned.overlap(chunk.local)) is not None:
            start = _start(common, planned, piece)
            slices.append((hf_name, piece.dim, start, common.moved(chunk.local.offset, (0,) * len(load.shape))))
    covered = sum(target.volume for _, _, _, target in slices)
    if covered != chunk.local.volume and not chunk.padded:
        raise ConversionError(f"{chunk.mcore_name}: {covered} of {chunk.local.volume} elements are planned")
    # Only the vocabulary is padded; its padding is not covered by any slice and must be zero.
    allocate = torch.empty if covered == chunk.local.volume else torch.zeros
    out = allocate(chunk.local.shape, dtype=dtypes[chunk.mcore_name])
    for hf_name, dim, start, target in slices:
        source.read_into(hf_name, target.view(out), dim=dim, start=start)
    return out


def _start(common: Box, planned: Box, piece: Piece) -> int:
    """Return the HF tensor's index along piece.dim at which `common`, a part of the piece's box `planned`, begins."""
    if not common.shape:
        return 0
    # A slice of an HF tensor is read along one dimension, so the chunk must cover the piece in all other dimensions.
    for dim, (size, whole) in enumerate(zip(common.shape, planned.shape, strict=True)):
        assert dim == piece.dim or size == whole, f"{piece.mcore_name} is cut along two dims"
    return piece.start + common.offset[piece.dim] - piece.local_start


def loads_by_name(loads: Sequence[TensorLoad], state: ShardedRankState) -> dict[str, TensorLoad]:
    """Return the planned tensors of a rank by mcore name.

    Raises: ConversionError if names or shapes differ between the rank's model and its plan.
    """
    padded = {chunk.mcore_name for chunk in state.chunks if chunk.padded}
    by_name = {load.mcore_name: load for load in loads}
    problems = [f"{name} has no row" for name in state.shapes if name not in by_name]
    for name, load in by_name.items():
        shape = state.shapes.get(name)
        if shape is None:
            problems.append(f"the model has no {name}")
        # Megatron may pad the vocabulary further than the table does; only its length may differ.
        elif shape != load.shape and not (name in padded and shape >= load.shape and shape[1:] == load.shape[1:]):
            problems.append(f"{name} is {shape} in the model, {load.shape} in the table")
    if problems:
        raise ConversionError(f"the weight table does not fit megatron's model: {listing(problems)}")
    return by_name


def stored_dtypes(source: HFCheckpoint, bound: Sequence[BoundRow]) -> dict[str, torch.dtype]:
    """Map mcore names to the dtype of their HF tensors; a conversion keeps this dtype.

    Raises: ConversionError if tensors that Megatron fuses differ in dtype.
    """
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    for row in bound:
        dtypes.setdefault(row.mcore, {}).update({name: source.dtype(name) for name in row.hf})
    problems = [
        ", ".join(f"{name} is {dtype}" for name, dtype in parts.items())
        for parts in dtypes.values()
        if len(set(parts.values())) > 1
    ]
    if problems:
        raise ConversionError(
            f"{source.directory}: megatron fuses tensors of different dtypes: {listing(problems)}; "
            "convert the source to one dtype first"
        )
    return {mcore: next(iter(parts.values())) for mcore, parts in dtypes.items()}
