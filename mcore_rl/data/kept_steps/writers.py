"""Writers of a step's batch: the driver writes scalars, one rank of each data-parallel rank writes trajectories.

A file that cannot be written is only logged: it does not concern the training.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcore_rl.config.observe import TRAJECTORIES
from mcore_rl.config.schema import Config
from mcore_rl.data.batching import gather
from mcore_rl.data.image_arrays import buffer_arrays
from mcore_rl.data.kept_steps.array_files import Arrays, write_arrays
from mcore_rl.data.trajectories import join_rows
from mcore_rl.types import Groups, RankShare, RolloutScalars, TrajectoryBuffers

logger = logging.getLogger(__name__)

RESPONSES, RANKS = "responses.safetensors", "rank_*.safetensors"
GREEDY = "greedy."
"""Prefix of the columns of greedy baselines."""
SAMPLES = "samples"
COLUMNS = {
    **dict.fromkeys(("group_ids", "prompt_rows"), np.int64),
    **dict.fromkeys(("total_tokens", "response_tokens", "trained_tokens", "versions"), np.int32),
    **dict.fromkeys(("rewards", "accuracies"), np.float32),
    "clipped": np.uint8,
}
"""Columns of RolloutScalars that advantages, filters and loss weights are computed from."""
_STEP = re.compile(r"step_(\d+)")


def kept_steps(directory: Path) -> list[int]:
    """Return the steps with a folder in `directory`, in order."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


@dataclass(frozen=True)
class ResponseWriter:
    """The driver's part. `num_steps`: steps that are kept, including the current one."""

    directory: Path
    num_steps: int

    @classmethod
    def from_config(cls, config: Config) -> ResponseWriter | None:
        """Return the writer; None if observe.keep_trajectories is 0."""
        number = config.observe.keep_trajectories
        return cls(Path(config.run.dir) / TRAJECTORIES, number) if number else None

    def begin(self, groups: Groups, step: int, version: int) -> None:
        """Remove steps that are no longer kept, and write the scalars of the step's responses. Call it before the batch
        is sent to the ranks, which write into the same folder.

        A folder of this step is removed, too: a start that saved nothing has left it.
        """
        folder = self.directory / f"step_{step}"
        try:
            for path in self.directory.glob(".step_*"):
                shutil.rmtree(path)
            for other in kept_steps(self.directory):
                if not step - self.num_steps < other < step:
                    _remove(self.directory / f"step_{other}")
            folder.mkdir(parents=True)
            write_arrays(folder / RESPONSES, _columns(groups), step=step, version=version)
        except OSError as error:
            logger.warning("%s cannot be written: %s", folder, error)


@dataclass(frozen=True)
class TrajectoryWriter:
    """The part of a data-parallel rank, for one of its processes."""

    directory: Path
    dp_rank: int

    @classmethod
    def from_config(cls, config: Config, dp_rank: int) -> TrajectoryWriter | None:
        """Return the writer; None if observe.keep_trajectories is 0."""
        kept = config.observe.keep_trajectories > 0
        return cls(Path(config.run.dir) / TRAJECTORIES, dp_rank) if kept else None

    def write(self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> None:
        """Write the trajectories of a batch. `shares`: its updates. A rank without responses writes nothing."""
        if not chunks:
            return
        # A rank of a run has one chunk; joining would copy it.
        trajectories = chunks[0] if len(chunks) == 1 else join_rows(chunks)
        firsts = np.cumsum([0, *(len(chunk.prompt_tokens) for chunk in chunks)])
        samples = np.full(firsts[-1], -1, np.int64)
        for share in shares:
            samples[firsts[share.chunk_ids] + share.rows] = share.samples
        arrays: Arrays = buffer_arrays(trajectories)
        # The weight version at the start of step n is n - 1.
        step = shares[0].version + 1
        path = self.directory / f"step_{step}" / RANKS.replace("*", str(self.dp_rank))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(path, arrays | {SAMPLES: samples}, step=step)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)


def _remove(folder: Path) -> None:
    # Rename first, so that an interruption leaves no folder with a part of its files.
    doomed = folder.with_name(f".{folder.name}.removed")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _columns(groups: Groups) -> Arrays:
    """Return the columns of the kept responses, in the order of `gather`, and of the greedy baselines."""
    columns = _joined(list(zip(groups.scalars, groups.keep, strict=True)))
    # As in KeptSamples: numbers that are equal for the responses of an episode.
    columns["episodes"] = gather(groups.scalars, groups.keep).episodes
    if groups.greedy:
        greedy = _joined([(part, np.arange(len(part.group_ids))) for part in groups.greedy])
        columns |= {f"{GREEDY}{name}": column for name, column in greedy.items()}
    return columns


def _joined(parts: Sequence[tuple[RolloutScalars, np.ndarray]]) -> Arrays:
    """Join the rows of each part."""
    return {
        name: np.concatenate([getattr(part, name)[rows] for part, rows in parts]).astype(dtype, copy=False)
        for name, dtype in COLUMNS.items()
    }
