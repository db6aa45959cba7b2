"""Which blocks of a checkpoint's tensors a rank of any layout holds, and where in its live tensors they lie.

Model weights have megatron's keys, global shapes and offsets; of a LoRA run there are only the adapters, under PEFT's
names. Optimizer state is sharded like the parameter it belongs
to, under megatron's keys too: `optimizer.state.exp_avg.<key of the parameter>`. The distributed optimizer owns a range
of a flattened parameter; a range of a matrix is part of a row, whole rows, and part of a row, so it is stored as up to
three blocks. Nothing is gathered: what a rank owns it writes itself, weights included, and the ranks of a
data-parallel group share the work of writing what all of them hold. Loading reads the same blocks in the new layout.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.megatron import cpu
from mcore_rl.megatron.lora.adapters import Factor, adapter_parameters, has_adapters
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.optim.optimizer_state import ParameterState, parameter_states
from model_converters.dcp.blocks import Box, CheckpointChunk, StateObject, flat_index, range_boxes, slice_box
from model_converters.dcp.reader import DcpReader

cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group  # noqa: E402


@dataclass(frozen=True)
class LiveBlock:
    """`view`, a block of a live tensor, is the block `chunk.stored` of the checkpoint's tensor `chunk.key`; `stored`
    has leading axes of size 1 that the view lacks."""

    chunk: CheckpointChunk
    view: torch.Tensor


@dataclass(frozen=True)
class _Placed:
    """A parameter or buffer of the model, and the stored blocks that it is made of."""

    tensor: torch.Tensor
    chunks: tuple[CheckpointChunk, ...]
    replica: tuple[int, ...]

    @property
    def optimized(self) -> bool:
        return self.tensor.requires_grad


def blocks_to_load(models: list[PolicyModel], optimizer: MegatronOptimizer) -> list[LiveBlock]:
    """Everything that this rank holds: weights, and the optimizer state of its ranges."""
    states = parameter_states(optimizer)
    blocks: list[LiveBlock] = []
    for placed in _all_placed(models):
        blocks += _weights(placed, 0, placed.tensor.numel())
        state = states.get(id(placed.tensor))
        if state is not None:
            blocks += _state(placed, state, state.start, state.stop)
    return blocks


def blocks_to_save(models: list[PolicyModel], optimizer: MegatronOptimizer) -> list[LiveBlock]:
    """What this rank writes: over all ranks, every element of every tensor exactly once."""
    states = parameter_states(optimizer)
    blocks: list[LiveBlock] = []
    for placed in _all_placed(models):
        if not placed.optimized:
            if is_main_replica(placed.replica):
                blocks += _weights(placed, 0, placed.tensor.numel())
            continue
        state = states.get(id(placed.tensor))
        # Replicas are numbered along (pipeline, tensor, data) ranks. The last share the work.
        if state is None or any(placed.replica[:-1]):
            continue
        start, stop = (state.start, state.stop) if state.sharded else _share(placed)
        blocks += _weights(placed, start, stop)
        blocks += _state(placed, state, start, stop)
    return blocks


REFERENCE = "reference."
"""Before the keys of a reference's weights; the converter leaves them out."""


def reference_blocks(models: list[PolicyModel], *, to_save: bool) -> list[LiveBlock]:
    """Weights of a model that is not trained: all that this rank holds, or what it writes of them."""
    return [
        block
        for placed in _all_placed(models)
        if not to_save or is_main_replica(placed.replica)
        for block in _blocks(placed, REFERENCE, placed.tensor.detach().view(-1), 0)
    ]


def extra_states(models: list[PolicyModel]) -> list[StateObject]:
    """What TransformerEngine's modules keep beside tensors, such as scaling factors of FP8; replicas left out."""
    return [
        StateObject(entry.unique_key, _pickled([entry.data]))
        for _, _, entry in _objects(models)
        if is_main_replica(entry.replica_id)
    ]


def load_extra_states(models: list[PolicyModel], reader: DcpReader) -> None:
    """Gives the modules theirs; one that was saved in parts by other ranks of another layout starts anew.

    Raises: ConversionError.
    """
    states_by_model: dict[int, dict[str, Any]] = {}
    for index, name, entry in _objects(models):
        if reader.has_object(entry.unique_key):
            states_by_model.setdefault(index, {})[name] = reader.read_object(entry.unique_key)[0]
    for index, states in states_by_model.items():
        models[index].load_state_dict(states, strict=False)


def _objects(models: list[PolicyModel]) -> Iterator[tuple[int, str, ShardedObject]]:
    """(index of the model, name in it, object)."""
    for index, model in enumerate(models):
        state = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group({}))
        for name, entry in state.items():
            if isinstance(entry, ShardedObject):
                yield index, name, entry


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _share(placed: _Placed) -> tuple[int, int]:
    """This data-parallel rank's even part of a parameter of which all hold the state."""
    if getattr(placed.tensor, "allreduce", True):
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    else:
        ranks = parallel_state.get_expert_data_parallel_world_size()
    size, index = placed.tensor.numel(), placed.replica[-1]
    return size * index // ranks, size * (index + 1) // ranks


def _all_placed(models: list[PolicyModel]) -> Iterator[_Placed]:
    if has_adapters(models):
        # Under them nothing is trained, and model.hf_path has it.
        yield from (_placed_factor(factor, parameter) for factor, parameter in adapter_parameters(models))
        return
    for model in models:
        # With parameters themselves (megatron's sharded_state_dict keeps them), not what they hold.
        state = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group({}))
        for entry in nested_values(state):
            if isinstance(entry, ShardedTensorFactory):
                yield _placed(entry, list(nested_values(entry.build())))
            elif isinstance(entry, ShardedTensor):
                yield _placed(entry, [entry])


def _placed_factor(factor: Factor, parameter: torch.Tensor) -> _Placed:
    """Under PEFT's names, in which no layout shows."""
    shape = tuple(parameter.shape)
    chunks = tuple(
        CheckpointChunk(
            part, whole, slice_box(whole, dim, start, length), part, slice_box(shape, dim, local_start, length)
        )
        for part, whole, dim, (start, local_start, length) in factor.parts()
    )
    tensor_rank = parallel_state.get_tensor_model_parallel_rank() if factor.num_shards == 1 else 0
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return _Placed(parameter, chunks, (0, tensor_rank, data_rank))


def _placed(entry: Any, parts: list[ShardedTensor]) -> _Placed:
    chunks = tuple(
        CheckpointChunk(
            key=part.key,
            global_shape=tuple(part.global_shape),
            stored=Box(tuple(part.global_offset), (1,) * part.prepend_axis_num + tuple(part.local_shape)),
            mcore_name=part.key,
            local=Box.of_view(part.data, entry.data),
            padded=part.allow_shape_mismatch,
        )
        for part in parts
    )
    assert isinstance(entry.replica_id, tuple), f"{entry.key} has replicas numbered along one axis only"
    return _Placed(entry.data, chunks, entry.replica_id)


def _weights(placed: _Placed, start: int, stop: int) -> Iterator[LiveBlock]:
    return _blocks(placed, "", placed.tensor.detach().view(-1)[start:stop], start)


def _state(placed: _Placed, state: ParameterState, start: int, stop: int) -> Iterator[LiveBlock]:
    for name, flat in state.tensors.items():
        yield from _blocks(placed, f"optimizer.state.{name}.", flat[start - state.start : stop - state.start], start)


def _blocks(placed: _Placed, prefix: str, flat: torch.Tensor, start: int) -> Iterator[LiveBlock]:
    """`flat` are elements from `start` on of something shaped like the parameter."""
    shape = tuple(placed.tensor.shape)
    for box in range_boxes(shape, start, start + flat.numel()):
        first = flat_index(shape, box.offset) - start
        values = flat[first : first + box.volume].view(box.shape)
        for chunk in placed.chunks:
            common = box.overlap(chunk.local)
            if common is not None:
                within = common.moved(box.offset, (0,) * len(shape))
                yield LiveBlock(_part(chunk, common, prefix), within.view(values))


def _part(chunk: CheckpointChunk, common: Box, prefix: str) -> CheckpointChunk:
    """The part of a chunk that lies at `common` in the local tensor."""
    stacked = len(chunk.stored.shape) - len(common.shape)
    inner = common.moved(chunk.local.offset, chunk.stored.offset[stacked:])
    stored = Box(chunk.stored.offset[:stacked] + inner.offset, (1,) * stacked + inner.shape)
    key = prefix + chunk.key
    return CheckpointChunk(key, chunk.global_shape, stored, key, common, chunk.padded)
