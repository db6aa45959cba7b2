"""Offload between phases and an optimizer on the host: training is bitwise equal, and the memory is freed."""

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
PIECE_ELEMENTS = 1 << 23
"""Elements of a piece of the optimizer. The largest parameter has four times as many and is a piece of its own."""
LARGEST = 32_768 * 1024
BYTES_PER_ELEMENT = 12 + 8
"""Main parameter and two moments (12), and two temporary lists of torch's unfused AdamW (8)."""


def actor(config: Any, rank: int, *, offload: bool, on_host: bool) -> Any:
    from mcore_rl.megatron.roles.actor import MegatronActor

    config.model.dtype = "bfloat16"
    config.actor.optimizer.cpu_offload = on_host
    for part in PARTS:
        setattr(config.actor.offload, part, offload)
    return MegatronActor(config, rank, 1, None)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("on_host", [False, True])
def test_training_is_bit_equal_to_state_on_the_device(kind: str, on_host: bool, device: str, tmp_path: Path) -> None:
    directory = str(write_tiny_model(tmp_path / kind, kind))
    function = with_and_without_host if on_host else with_and_without_moves
    assert launch_local(function, 1, directory, device=device) == [[]]


def with_and_without_moves(rank: int, directory: str) -> list[str]:
    """Return the names of tensors that differ between training with and without offloading between the steps."""
    repeat_to_the_bit()
    stays = actor(configure(directory, "bfloat16", {}), rank, offload=False, on_host=False)
    train_two_steps(stays)
    expected = held_tensors(stays)
    # An actor replaces the process groups of the previous one.
    leaves = actor(configure(directory, "bfloat16", {}), rank, offload=True, on_host=False)
    train_two_steps(leaves, leaves.memory.offload)
    assert leaves.memory.offload() > 0
    return differences(expected, held_tensors(leaves))


def with_and_without_host(rank: int, directory: str) -> list[str]:
    """Return the names of tensors that differ between training with the optimizer's state on the device and on the
    host."""
    from mcore_rl.megatron.optim import host_optimizer

    repeat_to_the_bit()
    host_optimizer.PIECE_ELEMENTS = 5000  # several pieces, of several parameters each
    states = []
    for on_host in (False, True):
        trained = actor(configure(directory, "bfloat16", {}), rank, offload=False, on_host=on_host)
        train_two_steps(trained)
        states.append({name: tensor.cpu() for name, tensor in held_tensors(trained).items()})
    return differences(*states)


@pytest.mark.cuda(only=True)
def test_the_device_has_the_bytes_that_offload_names(tmp_path: Path) -> None:
    [(named, rise)] = launch_local(offload, 1, str(write_model(tmp_path / "model", **MIDDLE)), device="cuda")
    assert named > 2 << 30
    # An allocator segment is not freed while a tensor that is not offloaded shares it.
    assert 0.97 * named <= rise <= 1.03 * named


def offload(rank: int, directory: str) -> tuple[int, int]:
    """Return the bytes that offload reports as freed, and the increase of the device's free memory."""
    config = actor_config(Path(directory), tokens_per_microbatch=4096)
    leaves = actor(config, rank, offload=True, on_host=False)
    share, buffers = trajectories(np.full(16, 224))
    leaves.update(leaves.recompute_logp([share], [buffers])[0], 0)
    torch.cuda.empty_cache()  # memory of the pass, which is free already, must not count
    before, _ = torch.cuda.mem_get_info()
    named = leaves.memory.offload()
    after, _ = torch.cuda.mem_get_info()
    return named, after - before


@pytest.mark.cuda(only=True)
def test_a_host_optimizer_step_takes_no_more_than_a_piece(tmp_path: Path) -> None:
    [(first, second, between)] = launch_local(step, 1, str(write_model(tmp_path / "model", **MIDDLE)), device="cuda")
    # The first step creates the moments, the second one transfers them.
    assert max(first, second) <= BYTES_PER_ELEMENT * LARGEST * 1.02
    assert abs(between) <= 1 << 20


def step(rank: int, directory: str) -> tuple[int, int, int]:
    """Return the memory peaks of two steps above the allocation before each, and the growth over the second; bytes."""
    from mcore_rl.megatron.optim import host_optimizer

    host_optimizer.PIECE_ELEMENTS = PIECE_ELEMENTS
    config = actor_config(Path(directory), tokens_per_microbatch=4096)
    trained = actor(config, rank, offload=False, on_host=True)
    share, buffers = trajectories(np.full(16, 224))
    rises, left = [], 0
    for _ in range(2):
        trained.accumulate_gradients(trained.recompute_logp([share], [buffers])[0], 0)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trained.optimizer.step()
        rises.append(torch.cuda.max_memory_allocated() - before)
        left = torch.cuda.memory_allocated() - before
    return rises[0], rises[1], left
