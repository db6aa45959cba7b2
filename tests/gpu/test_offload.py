"""Offloading between phases frees device memory for other processes, and the state returns bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training.actor_task import actor_config, trajectories, write_model
from tests.distributed.two_steps import configure, differences, held_tensors, train_two_steps
from tests.gpu.ranks import launch_local, repeat_to_the_bit
from tests.tiny_models import write_tiny_model

PARTS = ("params", "grads", "optimizer")
MIDDLE = {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 3072, "vocab_size": 32_768}
"""About 170 million parameters: 3 GB of state, large compared to the granularity of the allocator."""


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_training_between_moves_is_bit_equal(kind: str, device: str, tmp_path: Path) -> None:
    directory = str(write_tiny_model(tmp_path / kind, kind))
    assert launch_local(train_both_ways, 1, directory, device=device) == [[]]


def train_both_ways(rank: int, directory: str) -> list[str]:
    """Return the names of tensors that differ between training with and without offloading between the steps."""
    repeat_to_the_bit()
    stays = make_actor(rank, directory, offload=False)
    train_two_steps(stays)
    expected = held_tensors(stays)
    leaves = make_actor(rank, directory, offload=True)  # an actor replaces the process groups of the previous one
    train_two_steps(leaves, leaves.memory.offload)
    assert leaves.memory.offload() > 0
    return differences(expected, held_tensors(leaves))


def make_actor(rank: int, directory: str, *, offload: bool) -> Any:
    from mcore_rl.megatron.roles.actor import MegatronActor

    config = configure(directory, "bfloat16", {})
    for part in PARTS:
        setattr(config.actor.offload, part, offload)
    return MegatronActor(config, rank, 1, None)


@pytest.mark.cuda(only=True)
def test_the_device_has_the_bytes_that_offload_names(tmp_path: Path) -> None:
    [(named, rise)] = launch_local(measure, 1, str(write_model(tmp_path / "model", **MIDDLE)), device="cuda")
    assert named > 2 << 30
    # An allocator segment is not freed while a tensor that is not offloaded shares it.
    assert 0.97 * named <= rise <= 1.03 * named


def measure(rank: int, directory: str) -> tuple[int, int]:
    """Return the bytes that offload reports as freed, and the increase of the device's free memory."""
    from mcore_rl.megatron.roles.actor import MegatronActor

    config = actor_config(Path(directory), tokens_per_microbatch=4096)
    config.model.dtype = "bfloat16"
    for part in PARTS:
        setattr(config.actor.offload, part, True)
    actor = MegatronActor(config, rank, 1, None)
    share, buffers = trajectories(np.full(16, 224))
    actor.update(actor.recompute_logp([share], [buffers])[0], 0)
    torch.cuda.empty_cache()  # memory of the pass, which is free already, must not count
    before, _ = torch.cuda.mem_get_info()
    named = actor.memory.offload()
    after, _ = torch.cuda.mem_get_info()
    return named, after - before
