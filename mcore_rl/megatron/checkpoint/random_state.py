"""Random streams of a rank in a checkpoint. Another layout has other ranks: there the streams are seeded anew."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch

from mcore_rl.megatron import cpu
from mcore_rl.megatron.model import parallel
from model_converters.dcp.blocks import StateObject
from model_converters.dcp.reader import DcpReader

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.rank_model import RankModel

cpu.install()

from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states  # noqa: E402

_UPDATES_BETWEEN_SEEDS = 1_000_003
"""Streams of neighbouring seeds, those of pipeline stages, must not meet: a prime beyond any number of stages."""


def random_state_object(model: RankModel) -> StateObject:
    """The state of torch's generators and of megatron's named streams on this rank."""
    host, device, named = _get_all_rng_states()
    stream = io.BytesIO()
    torch.save({"host": host, "device": device, "named": named}, stream)
    return StateObject(_key(model), stream.getvalue())


def restore_random_state(
    model: RankModel, reader: DcpReader, *, same_layout: bool, seed: int, updates_done: int
) -> None:
    """The saved streams where the layout is the same, and the kind of device; else streams seeded by run.seed and the
    number of updates, so that a resumed run is repeatable and does not draw again what it drew before."""
    state = reader.read_object(_key(model)) if same_layout else None
    # The states of a GPU's generator and of a CPU's differ in size, and neither takes the other's.
    if state is not None and state["device"].shape == _get_all_rng_states()[1].shape:
        _set_all_rng_states(state["host"], state["device"], state["named"])
    else:
        parallel.seed_streams(seed + _UPDATES_BETWEEN_SEEDS * updates_done)


def _key(model: RankModel) -> str:
    # As megatron names objects: offset and shape of the grid that they lie in.
    return f"rng/shard_{model.rank}_{model.layout.world_size}"
