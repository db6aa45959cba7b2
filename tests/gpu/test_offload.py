"""State that leaves a GPU between phases: the memory is really free for others, and what comes back is to the bit."""

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
"""About 170 million parameters: 3 GB of state, beside which the allocator's granularity is small."""


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_training_between_moves_is_bit_equal(kind: str, device: str, tmp_path: Path) -> None:
    directory = str(write_tiny_model(tmp_path / kind, kind))
    assert launch_local(train_both_ways, 1, directory, device=device) == [[]]


def train_both_ways(rank: int, directory: str) -> list[str]:
    """Names of tensors in which training differs where all state leaves in between."""
    repeat_to_the_bit()
    stays = make_actor(rank, directory, offload=False)
    train_two_steps(stays)
    expected = held_tensors(stays)
    leaves = make_actor(rank, directory, offload=True)  # an actor replaces the groups of the one before
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
    # A segment of the allocator stays where a tensor that does not move shares it.
    assert 0.97 * named <= rise <= 1.03 * named


def measure(rank: int, directory: str) -> tuple[int, int]:
    """Bytes that offload says it gave up, and those by which the device's free memory rose."""
    from mcore_rl.megatron.roles.actor import MegatronActor

    config = actor_config(Path(directory), tokens_per_microbatch=4096)
    config.model.dtype = "bfloat16"
    for part in PARTS:
        setattr(config.actor.offload, part, True)
    actor = MegatronActor(config, rank, 1, None)
    share, buffers = trajectories(np.full(16, 224))
    actor.update(actor.recompute_logp([share], [buffers])[0], 0)
    torch.cuda.empty_cache()  # what the pass took and gave back is not what leaves
    before, _ = torch.cuda.mem_get_info()
    named = actor.memory.offload()
    after, _ = torch.cuda.mem_get_info()
    return named, after - before
