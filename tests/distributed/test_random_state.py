"""Random streams of a checkpoint written on another kind of device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.distributed.launch import launch
from tests.distributed.two_updates import make_actor
from tests.tiny_models import write_tiny_model

GPU_STATE = torch.zeros(16, dtype=torch.uint8)
"""State in the format of torch.cuda.get_rng_state: seed and offset, 8 bytes each."""


def test_random_state_of_gpu_on_cpu_is_seeded_anew(tmp_path: Path) -> None:
    """Streams are seeded by the seed and the number of updates, as in another layout; a CPU generator does not accept a
    GPU state."""
    directory = str(write_tiny_model(tmp_path / "model", "qwen3"))
    [(restored, seeded, later)] = launch(restore_gpu_state, 1, directory)
    assert restored == seeded
    assert restored != later


def restore_gpu_state(rank: int, directory: str) -> list[list[float]]:
    """Random numbers after restoring, after seeding for 3 updates, and after seeding for 4."""
    from mcore_rl.megatron.checkpoint.objects import _UPDATES_BETWEEN_SEEDS, restore_random_state
    from mcore_rl.megatron.model import parallel

    actor, _ = make_actor(rank, directory, {})
    seed = actor.config.run.seed
    restore_random_state(actor, _Saved(), same_layout=True, updates_done=3)  # type: ignore[arg-type]
    drawn = [torch.rand(4).tolist()]
    for updates in (3, 4):
        parallel.seed_streams(seed + _UPDATES_BETWEEN_SEEDS * updates)
        drawn.append(torch.rand(4).tolist())
    return drawn


class _Saved:
    """Reader of a checkpoint written by a rank on a GPU."""

    def read_object(self, key: str) -> dict[str, Any]:
        named = {"model-parallel-rng": GPU_STATE}
        return {"host": torch.Generator().manual_seed(77).get_state(), "device": GPU_STATE, "named": named}
