"""Saving of a checkpoint in one call on all ranks; a run uses several steps (runtime.groups.RankGroup.start_save)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.types import SavedState

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.rank_model import TrainedModel


def save_checkpoint(directory: str, model: TrainedModel) -> SavedState | None:
    """Write the state of all ranks into `directory`, which must be empty or absent. Returns the saved files on rank
    0."""
    import torch.distributed as dist

    from mcore_rl.megatron.checkpoint.writer import CheckpointWriter

    if model.rank == 0:
        Path(directory).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    writer = CheckpointWriter(directory, model, snapshot=False)
    reports = [None] * model.layout.world_size if model.rank == 0 else None
    dist.gather_object(writer.write(), reports)
    saved = writer.finish(reports) if reports is not None else None  # type: ignore[arg-type]
    dist.barrier()
    return saved
