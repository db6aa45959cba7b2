"""Places of a model's tensors in Megatron's distributed checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import PolicyModel
from model_converters.dcp.blocks import Box, CheckpointChunk


def stored_chunks(model: PolicyModel) -> list[CheckpointChunk]:
    """Describe where a checkpoint stores each tensor of a model on the meta device. Not collective."""
    state = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group({}))
    apply_factories(state)
    return list(chunks_of(list(nested_values(state)), canonical_tensors([model])))


def chunks_of(
    entries: Sequence[ShardedTensor | ShardedObject], tensors: Mapping[str, torch.Tensor]
) -> Iterator[CheckpointChunk]:
    """Map each shard to its tensor by the storage, and to its position in the tensor by the view's offset."""
    # Meta tensors have no data pointer, but the storage object is unique.
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    for entry in entries:
        if not isinstance(entry, ShardedTensor):
            continue
        name = owners.get(entry.data.untyped_storage()._cdata)
        assert name is not None, f"{entry.key} belongs to no tensor with a canonical name"
        yield stored_chunk(entry, name, tensors[name])


def stored_chunk(entry: ShardedTensor, mcore_name: str, tensor: torch.Tensor) -> CheckpointChunk:
    """Describe where the checkpoint stores the shard of `entry`, a view of `tensor`."""
    return CheckpointChunk(
        key=entry.key,
        global_shape=tuple(entry.global_shape),
        stored=Box(tuple(entry.global_offset), (1,) * entry.prepend_axis_num + tuple(entry.local_shape)),
        mcore_name=mcore_name,
        local=Box.of_view(entry.data, tensor),
        padded=entry.allow_shape_mismatch,
    )
