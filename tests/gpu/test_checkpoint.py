"""Checkpoints saved on a GPU restore its random streams; checkpoints saved without a GPU can be loaded too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import policy_batch
from tests.distributed.two_updates import make_actor
from tests.gpu.ranks import launch_local, repeat_to_the_bit
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3"))


def test_a_resumed_actor_draws_and_steps_as_the_one_that_saved(directory: str, device: str, tmp_path: Path) -> None:
    [(saved, resumed)] = launch_local(save_and_resume, 1, directory, str(tmp_path), device, device=device)
    assert saved == resumed


def save_and_resume(rank: int, directory: str, checkpoint: str, device: str) -> list[dict[str, Any]]:
    """Return the next random numbers and the next update's metrics, of the saving and of the loading actor."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    repeat_to_the_bit()
    after = []
    for resumes in (False, True):
        actor, shares = make_actor(directory, {})
        if resumes:
            load_checkpoint(checkpoint, actor)
        else:
            update(actor, shares[0])
            draw(device)  # otherwise a stream that was only seeded would be in the same state
            save_checkpoint(checkpoint, actor)
        after.append({"drawn": draw(device), "metrics": update(actor, shares[1])})
    return after


def draw(device: str) -> list[list[float]]:
    """Draw from the host's stream, the device's stream and Megatron's own stream."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        named = torch.rand(4, device=device).tolist()
    return [torch.rand(4).tolist(), torch.rand(4, device=device).tolist(), named]


def update(actor: Any, share: Any) -> dict[str, float]:
    batch, _ = actor.recompute_logp([share], policy_batch.chunks())
    return {name: metric.value for name, metric in actor.update(batch, 0).items()}


def test_one_written_without_a_gpu_goes_on_with_one(directory: str, device: str, tmp_path: Path) -> None:
    [expected] = launch_local(save, 1, directory, str(tmp_path), device="cpu")
    [metrics] = launch_local(resume, 1, directory, str(tmp_path), device=device)
    # The float32 sums have another order.
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


def save(rank: int, directory: str, checkpoint: str) -> dict[str, float]:
    """Return the metrics of the update after the saved one."""
    from tests.distributed.saving import save_checkpoint

    actor, shares = make_actor(directory, {})
    update(actor, shares[0])
    save_checkpoint(checkpoint, actor)
    return update(actor, shares[1])


def resume(rank: int, directory: str, checkpoint: str) -> dict[str, float]:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint

    actor, shares = make_actor(directory, {})
    load_checkpoint(checkpoint, actor)
    return update(actor, shares[1])
