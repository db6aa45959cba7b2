"""Reader of a kept step: the groups that its batch was built from, and their trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.data.image_arrays import DTYPES as IMAGE_DTYPES
from mcore_rl.data.image_arrays import array_buffers
from mcore_rl.data.kept_steps.array_files import Arrays, damaged, read_arrays
from mcore_rl.data.kept_steps.writers import COLUMNS, GREEDY, RANKS, RESPONSES, SAMPLES
from mcore_rl.data.trajectories import join_rows, take_rows
from mcore_rl.errors import DataError
from mcore_rl.types import BuffersRef, Groups, RolloutScalars, TrajectoryBuffers

_DTYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("token_offsets", "response_offsets"), (np.int64,)),
    **dict.fromkeys(("tokens", "prompt_tokens", "versions"), (np.int32,)),
    **dict.fromkeys(("logp_rollout", "turn_rewards", "temperatures"), (np.float32,)),
    "trained": (np.uint8,),
    "routed_experts": (np.uint8, np.int16),
    "kept_words": (np.int32,),
    "kept_offsets": (np.int64,),
    "hint_tokens": (np.int32,),
    "hint_offsets": (np.int64,),
    **IMAGE_DTYPES,
}
"""Allowed types of the arrays of TrajectoryBuffers and of their images."""
_PER_RESPONSE_TOKEN = ("logp_rollout", "versions", "trained", "turn_rewards")


@dataclass(frozen=True)
class KeptStep:
    """Batch of a trained step. `version`: weight version at its start. Row b of `trajectories` belongs to response b of
    `responses`."""

    step: int
    version: int
    responses: RolloutScalars
    greedy: tuple[RolloutScalars, ...]
    trajectories: TrajectoryBuffers

    def groups(self, chunk: BuffersRef) -> Groups:
        """Return the groups with all responses kept. `chunk` refers to `trajectories`."""
        everything = np.arange(len(self.responses.group_ids))
        return Groups((chunk,), (self.responses,), (everything,), self.greedy)


def read_step(directory: Path, step: int) -> KeptStep:
    """Read a step from the folder that writers.ResponseWriter writes to.

    Raises: DataError naming the file if one is missing or damaged, or has another version of the format.
    """
    folder = directory / f"step_{step}"
    path = folder / RESPONSES
    arrays, numbers = read_arrays(path, "step", "version")
    if numbers["step"] != step:
        raise damaged(path, f"it belongs to step {numbers['step']}")
    responses = _scalars(path, arrays, "")
    if len(arrays.get("episodes", ())) != len(responses.group_ids):
        raise damaged(path, "episodes are missing")
    greedy = (_scalars(path, arrays, GREEDY),) if f"{GREEDY}group_ids" in arrays else ()
    trajectories = _trajectories(folder, step, len(responses.group_ids))
    if not np.array_equal(np.diff(trajectories.token_offsets), responses.total_tokens):
        raise damaged(path, "its responses have other lengths than the trajectories beside it")
    return KeptStep(step, numbers["version"], responses, greedy, trajectories)


def _scalars(path: Path, arrays: Arrays, prefix: str) -> RolloutScalars:
    columns: dict[str, Any] = {}
    for name, dtype in COLUMNS.items():
        column = arrays.get(f"{prefix}{name}")
        num_axes = 2 if name == "versions" else 1
        if column is None or column.dtype != dtype or column.ndim != num_axes:
            raise damaged(path, f"{prefix}{name} is missing or has another type")
        columns[name] = column
    if len({len(column) for column in columns.values()}) > 1:
        raise damaged(path, "its columns have different lengths")
    return RolloutScalars(**columns, episodes=None if prefix else arrays.get("episodes"))


def _trajectories(folder: Path, step: int, count: int) -> TrajectoryBuffers:
    """Read the files of all ranks. Returns the trajectories in the order of the responses."""
    paths = sorted(folder.glob(RANKS))
    parts, samples = [], [np.empty(0, np.int64)]
    for path in paths:
        arrays, numbers = read_arrays(path, "step")
        if numbers["step"] != step:
            raise damaged(path, f"it belongs to step {numbers['step']}")
        own = arrays.pop(SAMPLES, None)
        if own is None or own.dtype != np.int64 or own.ndim != 1:
            raise damaged(path, f"{SAMPLES} is missing or has another type")
        samples.append(own)
        parts.append(_buffers(path, arrays, len(own)))
    order = np.concatenate(samples)
    if not np.array_equal(np.sort(order), np.arange(count)):
        raise DataError(
            f"{folder} has trajectories of {len(np.intersect1d(order, np.arange(count)))} of {count} responses; a "
            "process of the run could not write its file, or ended before (logs/ of the run has the reason)"
        )
    try:
        return take_rows(join_rows(parts), np.argsort(order))
    except ValueError as error:
        raise damaged(folder, f"its files do not belong together: {error}") from None


def _buffers(path: Path, arrays: Mapping[str, np.ndarray], count: int) -> TrajectoryBuffers:
    """Check shapes and types: the ranks index the arrays without checks."""
    if wrong := sorted(name for name, array in arrays.items() if array.dtype not in _DTYPES.get(name, ())):
        raise damaged(path, f"{wrong[0]} is unknown or has another type")
    try:
        buffers = array_buffers(arrays)
    except (TypeError, ValueError) as error:
        raise damaged(path, str(error)) from None
    for offsets in (buffers.token_offsets, buffers.response_offsets):
        if offsets.shape != (count + 1,) or offsets[0] or (np.diff(offsets) < 0).any():
            raise damaged(path, "its offsets are no offsets of its trajectories")
    responses = buffers.response_offsets[-1]
    sizes = dict.fromkeys(_PER_RESPONSE_TOKEN, responses) | {"prompt_tokens": count, "image_rows": count}
    sizes |= dict.fromkeys(("tokens", "routed_experts"), buffers.token_offsets[-1])
    if buffers.temperatures is not None and buffers.temperatures.ndim:
        sizes["temperatures"] = responses
    for name, size in sizes.items():
        if (array := getattr(buffers, name)) is not None and array.shape[:1] != (size,):
            raise damaged(path, f"{name} has another length than its offsets")
    _check_kept(path, buffers)
    _check_hints(path, buffers)
    lengths = buffers.prompt_tokens + np.diff(buffers.response_offsets)
    if not np.array_equal(lengths, np.diff(buffers.token_offsets)):
        raise damaged(path, "lengths of prompts and responses do not add up")
    return buffers


def _check_kept(path: Path, buffers: TrajectoryBuffers) -> None:
    """Check that the sets of kept tokens belong to the response tokens."""
    words, offsets = buffers.kept_words, buffers.kept_offsets
    if (words is None) != (offsets is None):
        raise damaged(path, "it has only one of kept_words and kept_offsets")
    if words is None or offsets is None:
        return
    tokens = int(buffers.response_offsets[-1])
    if offsets.shape != (tokens + 1,) or offsets[0] or (np.diff(offsets) < 0).any() or words.shape != (offsets[-1],):
        raise damaged(path, "kept_offsets are no offsets of its response tokens in kept_words")


def _check_hints(path: Path, buffers: TrajectoryBuffers) -> None:
    """Check that the prompts with hints belong to the trajectories."""
    tokens, offsets = buffers.hint_tokens, buffers.hint_offsets
    if (tokens is None) != (offsets is None):
        raise damaged(path, "it has only one of hint_tokens and hint_offsets")
    if tokens is None or offsets is None:
        return
    shape = (len(buffers.prompt_tokens) + 1,)
    if offsets.shape != shape or offsets[0] or (np.diff(offsets) < 0).any() or tokens.shape != (offsets[-1],):
        raise damaged(path, "hint_offsets are no offsets of its trajectories in hint_tokens")
