"""Parts of a checkpoint that are not tensors: random streams, and extra states of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from mcore_rl.megatron.model import parallel
from mcore_rl.megatron.model.output import ModelChunk
from mcore_rl.megatron.model.sharded import pickled_object
from mcore_rl.megatron.model.shards import stand_ins
from model_converters.dcp.blocks import StateObject
from model_converters.dcp.reader import DcpReader

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.rank_model import TrainedModel
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states

_UPDATES_BETWEEN_SEEDS = 1_000_003
"""Distance of the seeds of successive updates: a prime far larger than the seed offsets of pipeline stages, so that the
seeds of different updates and stages do not coincide."""


def random_state_object(model: TrainedModel) -> StateObject:
    """Save the state of torch's generators and Megatron's named streams on this rank."""
    host, device, named = _get_all_rng_states()
    return pickled_object(_key(model), {"host": host, "device": device, "named": named})


def restore_random_state(model: TrainedModel, reader: DcpReader, *, same_layout: bool, updates_done: int) -> None:
    """Restore the saved streams if layout and device type are the same. Otherwise seed them by run.seed and the number
    of updates, so that a resumed run is reproducible and does not repeat earlier random numbers."""
    state = reader.read_object(_key(model)) if same_layout else None
    # Generator states of GPU and CPU have different sizes and are not interchangeable.
    if state is not None and state["device"].shape == _get_all_rng_states()[1].shape:
        _set_all_rng_states(state["host"], state["device"], state["named"])
    else:
        parallel.seed_streams(model.seed + _UPDATES_BETWEEN_SEEDS * updates_done)


def _key(model: TrainedModel) -> str:
    # Megatron's naming of sharded objects: offset and shape of the grid of shards.
    return f"rng/shard_{model.rank}_{model.layout.world_size}"


def extra_states(models: list[ModelChunk]) -> list[StateObject]:
    """Return the extra states of TransformerEngine's modules, such as FP8 scaling factors, without replicas."""
    return [
        pickled_object(entry.unique_key, [entry.data])
        for model in models
        for _, entry in _objects(model)
        if is_main_replica(entry.replica_id)
    ]


def load_extra_states(models: list[ModelChunk], reader: DcpReader) -> None:
    """Load the extra states into the modules. A state that another layout saved in different parts is not loaded, and
    the module starts with a new one.

    Raises: ConversionError.
    """
    for model in models:
        stored = [(name, entry.unique_key) for name, entry in _objects(model) if reader.has_object(entry.unique_key)]
        # Only extra states are passed; the weights are read block by block.
        if stored:
            model.load_state_dict({name: reader.read_object(key)[0] for name, key in stored}, strict=False)


def _objects(model: ModelChunk) -> Iterator[tuple[str, ShardedObject]]:
    """Yield (name in the model, object)."""
    with stand_ins(model):
        state = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group({}))
    yield from ((name, entry) for name, entry in state.items() if isinstance(entry, ShardedObject))
