"""Saving and restoring of a rank's random streams. In another layout the streams are seeded anew."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch

from mcore_rl.megatron.model import parallel
from model_converters.dcp.blocks import StateObject
from model_converters.dcp.reader import DcpReader

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.rank_model import RankModel
from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states

_UPDATES_BETWEEN_SEEDS = 1_000_003
"""Distance of the seeds of successive updates: a prime far larger than the seed offsets of pipeline stages, so that the
seeds of different updates and stages do not coincide."""


def random_state_object(model: RankModel) -> StateObject:
    """Save the state of torch's generators and Megatron's named streams on this rank."""
    host, device, named = _get_all_rng_states()
    stream = io.BytesIO()
    torch.save({"host": host, "device": device, "named": named}, stream)
    return StateObject(_key(model), stream.getvalue())


def restore_random_state(
    model: RankModel, reader: DcpReader, *, same_layout: bool, seed: int, updates_done: int
) -> None:
    """Restore the saved streams if layout and device type are the same. Otherwise seed them by run.seed and the number
    of updates, so that a resumed run is reproducible and does not repeat earlier random numbers."""
    state = reader.read_object(_key(model)) if same_layout else None
    # Generator states of GPU and CPU have different sizes and are not interchangeable.
    if state is not None and state["device"].shape == _get_all_rng_states()[1].shape:
        _set_all_rng_states(state["host"], state["device"], state["named"])
    else:
        parallel.seed_streams(seed + _UPDATES_BETWEEN_SEEDS * updates_done)


def _key(model: RankModel) -> str:
    # Megatron's naming of sharded objects: offset and shape of the grid of shards.
    return f"rng/shard_{model.rank}_{model.layout.world_size}"
