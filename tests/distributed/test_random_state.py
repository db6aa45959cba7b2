"""Random streams of a checkpoint that a rank with another kind of device wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.distributed.launch import launch
from tests.distributed.two_updates import make_actor
from tests.tiny_models import write_tiny_model

GPU_STATE = torch.zeros(16, dtype=torch.uint8)
"""As torch.cuda.get_rng_state returns it: seed and offset, 8 bytes each."""


def test_the_streams_of_a_gpu_are_seeded_anew_on_a_cpu(tmp_path: Path) -> None:
    """By the seed and the updates done, as in another layout; a CPU's generator refuses a GPU's state."""
    directory = str(write_tiny_model(tmp_path / "model", "qwen3"))
    [(restored, seeded, later)] = launch(restore_that_of_a_gpu, 1, directory)
    assert restored == seeded
    assert restored != later


def restore_that_of_a_gpu(rank: int, directory: str) -> list[list[float]]:
    """Numbers drawn after restoring, after seeding as for 3 updates, and as for 4."""
    from mcore_rl.megatron.checkpoint.random_state import _UPDATES_BETWEEN_SEEDS, restore_random_state
    from mcore_rl.megatron.model import parallel

    actor, _ = make_actor(rank, directory, {})
    seed = actor.config.run.seed
    restore_random_state(actor.model, _Saved(), same_layout=True, updates_done=3)  # type: ignore[arg-type]
    drawn = [torch.rand(4).tolist()]
    for updates in (3, 4):
        parallel.seed_streams(seed + _UPDATES_BETWEEN_SEEDS * updates)
        drawn.append(torch.rand(4).tolist())
    return drawn


class _Saved:
    """A checkpoint's reader, of a rank on a GPU."""

    def read_object(self, key: str) -> dict[str, Any]:
        named = {"model-parallel-rng": GPU_STATE}
        return {"host": torch.Generator().manual_seed(77).get_state(), "device": GPU_STATE, "named": named}
