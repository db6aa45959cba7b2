"""actor.optimizer.cpu_offload on a GPU trains bitwise identically, with at most one piece of the state there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training.actor_task import actor_config, trajectories, write_model
from tests.distributed.two_steps import configure, differences, held_tensors, train_two_steps
from tests.gpu.ranks import launch_local, repeat_to_the_bit
from tests.gpu.test_offload import MIDDLE
from tests.tiny_models import write_tiny_model

PIECE_ELEMENTS = 1 << 23
"""Elements of a piece. The largest parameter has four times as many and is a piece of its own."""
LARGEST = 32_768 * 1024
BYTES_PER_ELEMENT = 12 + 8
"""Main parameter and two moments (12), and two temporary lists of torch's unfused AdamW (8)."""


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_training_is_bit_equal_to_state_on_the_device(kind: str, device: str, tmp_path: Path) -> None:
    directory = str(write_tiny_model(tmp_path / kind, kind))
    assert launch_local(train_both_ways, 1, directory, device=device) == [[]]


def train_both_ways(rank: int, directory: str) -> list[str]:
    """Return the names of tensors that differ between training with the optimizer's state on the device and on the
    host."""
    from mcore_rl.megatron.optim import host_optimizer

    repeat_to_the_bit()
    host_optimizer.PIECE_ELEMENTS = 5000  # several pieces, of several parameters each
    states = []
    for on_host in (False, True):
        actor = make_actor(rank, directory, on_host=on_host)
        train_two_steps(actor)
        states.append({name: tensor.cpu() for name, tensor in held_tensors(actor).items()})
    return differences(*states)


def make_actor(rank: int, directory: str, *, on_host: bool) -> Any:
    from mcore_rl.megatron.roles.actor import MegatronActor

    config = configure(directory, "bfloat16", {})
    config.actor.optimizer.cpu_offload = on_host
    return MegatronActor(config, rank, 1, None)


@pytest.mark.cuda(only=True)
def test_a_step_takes_no_more_than_a_piece(tmp_path: Path) -> None:
    [(first, second, between)] = launch_local(measure, 1, str(write_model(tmp_path / "model", **MIDDLE)), device="cuda")
    # The first step creates the moments, the second one transfers them.
    assert max(first, second) <= BYTES_PER_ELEMENT * LARGEST * 1.02
    assert abs(between) <= 1 << 20


def measure(rank: int, directory: str) -> tuple[int, int, int]:
    """Return the memory peaks of two steps above the allocation before each, and the growth over the second; bytes."""
    from mcore_rl.megatron.optim import host_optimizer
    from mcore_rl.megatron.roles.actor import MegatronActor

    host_optimizer.PIECE_ELEMENTS = PIECE_ELEMENTS
    config = actor_config(Path(directory), tokens_per_microbatch=4096)
    config.model.dtype = "bfloat16"
    config.actor.optimizer.cpu_offload = True
    actor = MegatronActor(config, rank, 1, None)
    share, buffers = trajectories(np.full(16, 224))
    rises, left = [], 0
    for _ in range(2):
        actor.accumulate_gradients(actor.recompute_logp([share], [buffers])[0], 0)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        actor.optimizer.step()
        rises.append(torch.cuda.max_memory_allocated() - before)
        left = torch.cuda.memory_allocated() - before
    return rises[0], rises[1], left
