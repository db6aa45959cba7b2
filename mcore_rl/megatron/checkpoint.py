"""Trainer state as a megatron-core distributed checkpoint: model, optimizer, schedule, random state.

Source: megatron.core.dist_checkpointing (0.16.1).
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron import cpu
from model_converters.side_files import HF_FOLDER, copy_side_files

cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group  # noqa: E402

if TYPE_CHECKING:
    from mcore_rl.megatron.actor import MegatronActor

# fully_reshardable keeps optimizer state by parameter, so that another TP, PP or DP size can read it.
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


# megatron 0.16.1 keeps a manager process of multiprocessing for the results of writers, started at the first save; it
# outlives a killed rank. A save that is not asynchronous puts and gets them in one process, so a plain queue does.
filesystem_async._results_queue = queue.SimpleQueue()


def save_checkpoint(directory: str, actor: MegatronActor) -> None:
    """Writes the state of all ranks into the existing, empty `directory`, and the configuration and tokenizer files
    that make its weights a model again (`python -m model_converters to-hf`).

    Collective: all ranks.
    Raises: OSError when the disk is full; CheckpointError for any other failure to write.
    """
    actor.gather_parameters()
    try:
        dist_checkpointing.save(_sharded_state(actor, loading=False), directory)
    except CheckpointException as error:
        # The writers are processes of their own, and megatron 0.16.1 drops what they raised.
        needed = sum(tensor.nbytes for tensor in actor.tensors().values())
        if shutil.disk_usage(directory).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory) from error
        raise CheckpointError(f"{directory} could not be written: {error}") from error
    if actor.rank == 0:
        copy_side_files(actor.config.model.hf_path, Path(directory) / HF_FOLDER, actor.hf_config)


def load_checkpoint(directory: str, actor: MegatronActor) -> None:
    """Restores what save_checkpoint wrote, bit by bit when the layout is the same.

    Raises: CheckpointError.
    Collective: all ranks.
    """
    if not (Path(directory) / "metadata.json").is_file():
        raise CheckpointError(f"{directory} is not a megatron-core distributed checkpoint")
    try:
        state = dist_checkpointing.load(_sharded_state(actor, loading=True), directory)
    except (CheckpointingException, KeyError, ValueError) as error:
        raise CheckpointError(f"{directory} does not fit this model and layout: {error}") from error
    for index, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(state[_chunk_key(index)], strict=True)
    actor.optimizer.load_state_dict(state["optimizer"])
    actor.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])


def _chunk_key(index: int) -> str:
    return f"model{index}"


def _sharded_state(actor: MegatronActor, *, loading: bool) -> dict[str, Any]:
    actor.memory.load("params", "optimizer")
    # The copies that multi-token prediction has of embedding and head are named by the group (0.16.1 makes it for all
    # else by itself).
    metadata = ensure_metadata_has_dp_cp_group({})
    state: dict[str, Any] = {
        _chunk_key(index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(actor.chunks)
    }
    if loading:
        actor.materialize_optimizer_state()
    state["optimizer"] = actor.optimizer.sharded_state_dict(state, is_loading=loading, metadata=OPTIMIZER_FORMAT)
    state["scheduler"] = actor.scheduler.state_dict()
    state["rng"] = ShardedObject("rng", torch.get_rng_state(), (actor.world_size,), (actor.rank,))
    return state
