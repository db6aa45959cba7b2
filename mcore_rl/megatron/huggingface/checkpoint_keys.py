"""Places of HF tensors in Megatron's distributed checkpoints.

A run with transformers' model saves and loads checkpoints of Megatron's model: the same keys, shapes and positions. The
family's table maps each HF tensor to indices of Megatron's tensors. A copy of Megatron's model on the meta device gives
the places of these indices in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from mcore_rl.megatron.huggingface.stacked_experts import HFPart
from model_converters.dcp.blocks import Box, CheckpointChunk, slice_box
from model_converters.mapping.placement import local_shape, segments_of
from model_converters.mapping.table import BoundRow


def hf_chunks(bound: Sequence[BoundRow], chunks: Sequence[CheckpointChunk]) -> dict[str, list[CheckpointChunk]]:
    """Return the blocks of each HF tensor. `bound` is the family's table, `chunks` are the blocks of Megatron's tensors
    on a single rank."""
    by_name: dict[str, list[CheckpointChunk]] = {}
    for chunk in chunks:
        by_name.setdefault(chunk.mcore_name, []).append(chunk)
    found: dict[str, list[CheckpointChunk]] = {}
    for row in bound:
        for part, start, local_start, length in segments_of(row.row, 0, 1):
            shape = local_shape(row.row, 1)
            segment = slice_box(shape, row.row.dim, local_start, length)
            # A tied head has no tensor, and so no chunk.
            for chunk in by_name.get(row.mcore, []):
                common = segment.overlap(chunk.local)
                if common is not None:
                    local = common.moved(segment.offset, slice_box(shape, row.row.dim, start, length).offset)
                    found.setdefault(row.hf[part], []).append(
                        replace(chunk, mcore_name=row.hf[part], stored=_stored(chunk, common), local=local)
                    )
    return found


def _stored(chunk: CheckpointChunk, common: Box) -> Box:
    """Return the position in the checkpoint of block `common` of Megatron's tensor."""
    stacked = len(chunk.stored.shape) - len(common.shape)
    inner = common.moved(chunk.local.offset, chunk.stored.offset[stacked:])
    return Box(chunk.stored.offset[:stacked] + inner.offset, (1,) * stacked + inner.shape)


def parameter_chunks(
    parts: Mapping[str, Sequence[HFPart]], chunks: Mapping[str, Sequence[CheckpointChunk]]
) -> dict[str, list[CheckpointChunk]]:
    """Return the blocks of each parameter, which may be stacked, from the blocks of HF tensors (hf_chunks)."""
    return {
        name: [replace(chunk, local=part.inside(chunk.local)) for part in of_name for chunk in chunks[part.hf_name]]
        for name, of_name in parts.items()
    }


def sharded_state(
    parameters: Mapping[str, torch.Tensor], chunks: Mapping[str, Sequence[CheckpointChunk]], data_rank: int
) -> dict[str, ShardedTensorFactory]:
    """Describe whole parameters and router biases by name as Megatron's models do."""
    return {
        name: ShardedTensorFactory(
            name, parameter, _builder(chunks[name]), merge_fn=_unused, replica_id=(0, 0, data_rank)
        )
        for name, parameter in parameters.items()
    }


_Build = Callable[[str, torch.Tensor, tuple[int, ...], None], list[ShardedTensor]]


def _builder(chunks: Sequence[CheckpointChunk]) -> _Build:
    def build(key: str, tensor: torch.Tensor, replica: tuple[int, ...], _: None) -> list[ShardedTensor]:
        return [_entry(chunk, chunk.local.view(tensor), replica) for chunk in chunks]

    return build


def _entry(chunk: CheckpointChunk, view: torch.Tensor, replica: tuple[int, ...]) -> ShardedTensor:
    return ShardedTensor(
        chunk.key,
        view,
        view.dtype,
        tuple(view.shape),
        chunk.global_shape,
        chunk.stored.offset,
        axis_fragmentations=None,
        replica_id=replica,
        prepend_axis_num=len(chunk.stored.shape) - view.dim(),
        allow_shape_mismatch=chunk.padded,
    )


def _unused(state: object) -> NoReturn:
    raise AssertionError("checkpoints are read block by block (checkpoint/restore.py)")
