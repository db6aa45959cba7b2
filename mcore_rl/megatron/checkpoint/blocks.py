"""Mapping between blocks of a checkpoint's tensors and the tensors of a rank, for any layout.

Model weights have Megatron's keys, global shapes and offsets. A LoRA run stores only the adapters, under PEFT's names.
Optimizer state is sharded like its parameter, under Megatron's keys: `optimizer.state.exp_avg.<key of the parameter>`.
The distributed optimizer owns ranges of flattened parameters. A range of a matrix consists of a partial row, whole
rows, and a partial row, so it is stored as up to three blocks. Nothing is gathered: each rank writes what it owns, and
the ranks of a data-parallel group divide the tensors that all of them hold. Loading reads the blocks of the new layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from mcore_rl.megatron.lora.adapters import Factor, adapter_parameters, has_adapters
from mcore_rl.megatron.model.output import ModelChunk
from mcore_rl.megatron.model.shards import replicas_of, shard_dtype, shard_of, stand_ins
from mcore_rl.megatron.model.stored_chunks import stored_chunk
from mcore_rl.megatron.model.value_model import heads
from mcore_rl.megatron.optim.optimizer_state import ParameterState, parameter_states
from model_converters.dcp.blocks import Box, CheckpointChunk, flat_index, range_boxes, slice_box
from model_converters.hf.value_head import VALUE_HEAD

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.rank_model import TrainedModel


@dataclass(frozen=True)
class LiveBlock:
    """A block of a tensor in memory (`view`) that corresponds to block `chunk.stored` of the checkpoint's tensor
    `chunk.key`. `stored` may have additional leading dimensions of size 1."""

    chunk: CheckpointChunk
    view: torch.Tensor


@dataclass(frozen=True)
class _ModelTensor:
    """A parameter or buffer of the model, its blocks in the checkpoint, and its replica id.

    tensor: elements that this rank stores, the whole tensor or a shard of it. shape: shape of the whole tensor.
    first: index of the first stored element in the flattened tensor.
    """

    tensor: torch.Tensor
    shape: torch.Size
    first: int
    chunks: tuple[CheckpointChunk, ...]
    replica: tuple[int, ...]


def blocks_to_load(models: list[ModelChunk], optimizer: MegatronOptimizer) -> list[LiveBlock]:
    """Yield all blocks of this rank: weights, and the optimizer state of its ranges."""
    states = parameter_states(optimizer)
    blocks: list[LiveBlock] = []
    for item in _model_tensors(models):
        blocks += _weights(item, 0, item.tensor.numel())
        state = states.get(id(item.tensor))
        if state is not None:
            blocks += _state(item, state, state.owned.start, state.owned.stop)
    return blocks


def blocks_to_save(models: list[ModelChunk], optimizer: MegatronOptimizer) -> list[LiveBlock]:
    """Return the blocks that this rank writes. Over all ranks, every element of every tensor is written once."""
    states = parameter_states(optimizer)
    blocks: list[LiveBlock] = []
    for item in _model_tensors(models):
        # Frozen tensors and buffers are complete on every data-parallel rank, so the main replica writes them.
        if not item.tensor.requires_grad:
            if is_main_replica(item.replica):
                blocks += _weights(item, 0, item.tensor.numel())
            continue
        state = states.get(id(item.tensor))
        # Replica ids are (pipeline, tensor, data) ranks. Only data-parallel replicas divide the work.
        if state is None or any(item.replica[:-1]):
            continue
        # Weights are written with the state of the same elements, so each block is written by its owner.
        start, stop = (state.owned.start, state.owned.stop) if state.owned.sharded else _share(item)
        blocks += _weights(item, start, stop)
        blocks += _state(item, state, start, stop)
    return blocks


REFERENCE_PREFIX, AVERAGE_PREFIX = "reference.", "average."
"""Key prefixes of the weights of a reference model, and of moving averages of the policy's weights, each followed by
the number of its teacher; the converter ignores them."""


def weight_blocks(models: list[ModelChunk]) -> list[LiveBlock]:
    """Return all blocks of the weights of a model without an optimizer, under the keys of a policy."""
    return [
        block
        for item in _model_tensors(models)
        for block in _blocks(item, "", item.tensor.detach().view(-1), item.first)
    ]


def frozen_blocks(model: TrainedModel, *, to_save: bool) -> list[LiveBlock]:
    """Return the blocks of the saved reference and of the averages of a trained model: all blocks of this rank, or
    only the blocks that it writes. Loads the reference's weights."""
    blocks: list[LiveBlock] = []
    if (reference := model.saved_reference) is not None:
        # Its weights are in host memory between passes.
        reference.memory.load("params")
        blocks += _frozen(reference.chunks, REFERENCE_PREFIX, {}, to_save=to_save)
    for number, average in model.averages.items():
        # float32 weights are the average themselves.
        average.memory.load("params")
        blocks += _frozen(average.chunks, f"{AVERAGE_PREFIX}{number}.", average.masters, to_save=to_save)
    return blocks


def _frozen(
    models: list[ModelChunk], prefix: str, values: Mapping[int, torch.Tensor], *, to_save: bool
) -> list[LiveBlock]:
    """Return the blocks of a frozen model. `values` of a tensor, by its id, replace the tensor's own."""
    return [
        block
        for item in _model_tensors(models)
        if not to_save or is_main_replica(item.replica)
        for block in _blocks(item, prefix, values.get(id(item.tensor), item.tensor).detach().view(-1), item.first)
    ]


def _share(item: _ModelTensor) -> tuple[int, int]:
    """Return this data-parallel rank's equal part of a parameter whose state all ranks of the group hold."""
    size, index, ranks = item.tensor.numel(), item.replica[-1], replicas_of(item.tensor).size()
    # Neighbouring parts round the same bound, so together they contain every element once.
    return size * index // ranks, size * (index + 1) // ranks


def _model_tensors(models: list[ModelChunk]) -> Iterator[_ModelTensor]:
    if has_adapters(models):
        # The base model is frozen and can be loaded from model.hf_path.
        yield from (_adapter_tensor(factor, parameter) for factor, parameter in adapter_parameters(models))
        # A reward model's head is trained beside its adapters.
        yield from (_head_tensor(head) for head in heads(models))
        return
    for model in models:
        # The entries refer to the parameters themselves, because sharded_state_dict does not detach them. Their ids
        # are used to find the optimizer state.
        with stand_ins(model) as shards:
            state = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group({}))
        for entry in nested_values(state):
            # A factory stores one tensor in several parts, such as gate and up of a fused SwiGLU projection.
            if isinstance(entry, ShardedTensorFactory):
                yield _model_tensor(entry, list(nested_values(entry.build())), shards)
            elif isinstance(entry, ShardedTensor):
                yield _model_tensor(entry, [entry], shards)


def _adapter_tensor(factor: Factor, parameter: torch.Tensor) -> _ModelTensor:
    """Describe an adapter matrix under its PEFT name, which is independent of the layout."""
    shape = tuple(parameter.shape)
    chunks = tuple(
        CheckpointChunk(
            part, whole, slice_box(whole, dim, start, length), part, slice_box(shape, dim, local_start, length)
        )
        for part, whole, dim, (start, local_start, length) in factor.parts()
    )
    return _ModelTensor(parameter, parameter.shape, 0, chunks, _replica(replicated=factor.num_shards == 1))


def _head_tensor(head: torch.Tensor) -> _ModelTensor:
    shape = tuple(head.shape)
    whole = slice_box(shape, 0, 0, shape[0])
    chunk = CheckpointChunk(VALUE_HEAD, shape, whole, VALUE_HEAD, whole)
    return _ModelTensor(head, head.shape, 0, (chunk,), _replica(replicated=True))


def _replica(*, replicated: bool) -> tuple[int, ...]:
    """Return the replica id of a tensor, which tensor-parallel ranks hold alike or in shards."""
    # A replica id of 0 means that this rank writes: shards are written by all tensor-parallel ranks, a replicated
    # matrix by the first.
    tensor_rank = parallel_state.get_tensor_model_parallel_rank() if replicated else 0
    return (0, tensor_rank, parallel_state.get_data_parallel_rank(with_context_parallel=True))


def _model_tensor(
    entry: ShardedTensor | ShardedTensorFactory, parts: list[ShardedTensor], shards: Mapping[int, torch.Tensor]
) -> _ModelTensor:
    chunks = tuple(stored_chunk(part, part.key, entry.data) for part in parts)
    assert isinstance(entry.replica_id, tuple), f"{entry.key}: expected a replica id per parallel axis"
    shard = shards.get(id(entry.data))
    if shard is None:
        return _ModelTensor(entry.data, entry.data.shape, 0, chunks, entry.replica_id)
    at = shard_of(shard)
    assert at is not None
    # No other data-parallel rank has a replica of a shard.
    return _ModelTensor(shard, at.shape, at.start, chunks, (*entry.replica_id[:-1], 0))


def _weights(item: _ModelTensor, start: int, stop: int) -> Iterator[LiveBlock]:
    # A trained bfloat16 shard is float32: its weights are a rounded copy, which loading fills and then drops, because
    # the float32 values are in the checkpoint too.
    flat = item.tensor.detach().view(-1)[start:stop].to(shard_dtype(item.tensor))
    return _blocks(item, "", flat, item.first + start)


def _state(item: _ModelTensor, state: ParameterState, start: int, stop: int) -> Iterator[LiveBlock]:
    first = state.owned.start
    for name, flat in state.tensors.items():
        yield from _blocks(item, f"optimizer.state.{name}.", flat[start - first : stop - first], item.first + start)


def _blocks(item: _ModelTensor, prefix: str, flat: torch.Tensor, start: int) -> Iterator[LiveBlock]:
    """Split `flat`, the elements from `start` on of a flattened tensor shaped like the parameter, into blocks."""
    shape = tuple(item.shape)
    for box in range_boxes(shape, start, start + flat.numel()):
        # A box is contiguous in the flattened tensor, so its elements are one slice of `flat`.
        first = flat_index(shape, box.offset) - start
        values = flat[first : first + box.volume].view(box.shape)
        for chunk in item.chunks:
            common = box.overlap(chunk.local)
            if common is not None:
                # Position of the overlap relative to `values`, which starts at the offset of `box`.
                within = common.moved(box.offset, (0,) * len(shape))
                yield LiveBlock(_part(chunk, common, prefix), within.view(values))


def _part(chunk: CheckpointChunk, common: Box, prefix: str) -> CheckpointChunk:
    """Restrict a chunk to the block `common` of the local tensor."""
    stacked = len(chunk.stored.shape) - len(common.shape)
    inner = common.moved(chunk.local.offset, chunk.stored.offset[stacked:])
    stored = Box(chunk.stored.offset[:stacked] + inner.offset, (1,) * stacked + inner.shape)
    key = prefix + chunk.key
    return CheckpointChunk(key, chunk.global_shape, stored, key, common, chunk.padded)
