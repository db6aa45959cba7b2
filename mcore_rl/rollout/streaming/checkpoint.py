"""Saving and loading of groups that no step has trained.

groups.json        all groups: prompt, number, version, state; of finished ones also the scalars and the place of their
trajectories
records.jsonl      records of finished groups, in the order of groups.json
*.npz, *.journal   trajectories of finished groups, and sampled tokens of all groups, by engine. Files of numbers only:
loading them cannot execute code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.data.checksum import saved_file
from mcore_rl.data.image_arrays import array_buffers, buffer_arrays
from mcore_rl.data.trajectories import join_rows, split_rows
from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.rollout.journal import JournaledResponse, first_id, read_journal
from mcore_rl.rollout.streaming.interface import JOURNAL, Group, TaskStream
from mcore_rl.types import BuffersRef, RolloutScalars, RolloutTask, SavedFile, TrajectoryBuffers
from model_converters.durable_files import durable_write

GROUPS_FILE, RECORDS_FILE = "groups.json", "records.jsonl"
RUNNING, UNSCORED, FINISHED, ZERO_VARIANCE = "running", "unscored", "finished", "dull"
COUNTS = "counts"
"""Additional array in the file: number of trajectories of each buffer."""
ARRAY = "array"


@dataclass(frozen=True)
class SavedGroup:
    """`state` is RUNNING, UNSCORED, FINISHED or ZERO_VARIANCE. Groups in all but the first state have scalars,
    trajectories (entry `index` of the file `trajectories`), and `record_bytes` bytes in the records file."""

    number: int
    row: int
    version: int
    state: str
    scalars: RolloutScalars | None = None
    trajectories: str = ""
    index: int = 0
    record_bytes: int = 0


@dataclass(frozen=True)
class Bounds:
    """Configuration under which groups were submitted: rollout.max_staleness, max_staleness_hard,
    trainer.prompts_per_step, rollout.samples_per_prompt and rollout.keep_sampling_mask."""

    max_staleness: int
    max_staleness_hard: int
    prompts_per_step: int
    samples_per_prompt: int
    keep_sampling_mask: bool = False

    def require(self, saved: Bounds) -> None:
        """Check that groups of `saved` can be trained under these bounds.

        Raises: CheckpointError naming a key that was lowered, because existing groups could no longer be trained in
        time, or that must be equal.
        """
        for name, key in (
            ("max_staleness", "rollout.max_staleness"),
            ("max_staleness_hard", "rollout.max_staleness_hard"),
            ("prompts_per_step", "trainer.prompts_per_step"),
        ):
            if getattr(self, name) < getattr(saved, name):
                raise CheckpointError(
                    f"the checkpoint has groups that were submitted with {key}={getattr(saved, name)}, but this run "
                    f"has {getattr(self, name)}, with which they could become too old: restore the value or raise it"
                )
        for name in ("samples_per_prompt", "keep_sampling_mask"):
            before, now = (str(getattr(bounds, name)).lower() for bounds in (saved, self))
            if before != now:
                raise CheckpointError(
                    f"the checkpoint has groups with rollout.{name}={before}, but this run has {now}: restore the value"
                )


def write_groups(path: Path, bounds: Bounds, groups: Sequence[SavedGroup]) -> None:
    """Write groups.json durably.

    Raises: OSError.
    """
    content = {"bounds": vars(bounds), "groups": [_as_json(group) for group in groups]}
    with durable_write(path) as file:
        file.write(json.dumps(content, default=_array_as_json).encode())


def read_groups(path: Path) -> tuple[Bounds, list[SavedGroup]]:
    """Read groups.json, whose checksum has been verified.

    Raises: CheckpointError if another version with different fields wrote it.
    """
    content = json.loads(path.read_text(encoding="utf-8"), object_hook=_array_from_json)
    try:
        return Bounds(**content["bounds"]), [_from_json(group) for group in content["groups"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the in-flight groups in {path} were saved by another version of mcore-rl ({error}): resume with that "
            "version, or start from the weights only (python -m model_converters to-hf) in another run.dir"
        ) from None


def check_files(directory: Path, files: Sequence[SavedFile]) -> None:
    """Raise DamagedCheckpointError naming the first file whose checksum differs."""
    for file in files:
        if saved_file(directory, file.name) != file:
            raise DamagedCheckpointError(
                f"{directory.parent} is damaged: {directory.name}/{file.name} has another checksum than was saved"
            )


def write_trajectories(path: Path, parts: Sequence[TrajectoryBuffers]) -> SavedFile:
    """Write at least one part durably; returns the file's name and checksum.

    Raises: OSError.
    """
    joined = join_rows(parts)
    arrays: dict[str, Any] = {**buffer_arrays(joined)}
    arrays[COUNTS] = np.array([len(part.prompt_tokens) for part in parts], np.int64)
    with durable_write(path) as file:
        np.savez(file, **arrays)
    return saved_file(path.parent, path.name)


def read_trajectories(path: Path) -> list[TrajectoryBuffers]:
    """Read the parts in order."""
    with np.load(path, allow_pickle=False) as arrays:
        given = {name: arrays[name] for name in arrays.files if name != COUNTS}
        return split_rows(array_buffers(given), arrays[COUNTS].tolist())


def read_sampled(path: Path, request_ids: Sequence[Sequence[str]]) -> list[JournaledResponse]:
    """Read the responses to these requests, and to later turns of their episodes, from the journal beside a file of
    trajectories; [] if its engine kept no journal."""
    first_ids = {request_id for of_task in request_ids for request_id in of_task}
    sampled = read_journal(path.with_suffix(JOURNAL))
    return [response for name, response in sampled.items() if first_id(name) in first_ids and response.finish_reason]


def _as_json(group: SavedGroup) -> dict[str, object]:
    scalars = None if group.scalars is None else dict(vars(group.scalars))
    if scalars is not None:
        # The name in checkpoints of earlier versions, so that they stay readable.
        scalars["figures"] = scalars.pop("episode_metrics")
    return {**vars(group), "scalars": scalars}


def _from_json(given: dict[str, Any]) -> SavedGroup:
    scalars = given.pop("scalars")
    if scalars is None:
        return SavedGroup(**given)
    scalars["episode_metrics"] = scalars.pop("figures", {})
    # JSON has no tuples.
    for name in ("errors", "version_tokens"):
        scalars[name] = tuple((first, second) for first, second in scalars[name])
    return SavedGroup(**given, scalars=RolloutScalars(**scalars))


def _array_as_json(value: object) -> dict[str, object]:
    """Convert an array to JSON with its type; JSON preserves float32, float64 and NaN exactly."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} in the scalars of a group")
    return {ARRAY: value.dtype.str, "values": value.tolist()}


def _array_from_json(value: dict[str, Any]) -> object:
    return np.array(value["values"], np.dtype(value[ARRAY])) if ARRAY in value else value


def save_groups(
    stream: TaskStream, directory: Path, bounds: Bounds, groups: Sequence[tuple[int | None, Group, str]]
) -> tuple[SavedFile, ...]:
    """Write groups, each with its ticket if it is running, and its state. File names are relative to `directory`.

    Raises: OSError.
    """
    tickets = [ticket for ticket, _, _ in groups if ticket is not None]
    ended = [group for ticket, group, _ in groups if ticket is None]
    saved = stream.save(directory, [group.result[0] for group in ended if group.result is not None], tickets)
    # Places and records of the ended groups only, in their order in `groups`.
    places, written = iter(saved.places), []
    with durable_write(directory / RECORDS_FILE) as records:
        for ticket, group, state in groups:
            entry = SavedGroup(group.number, int(group.task.prompt_rows[0]), group.version, state)
            if ticket is None:
                file, index = next(places)
                size = records.write(Path(str(group.task.records)).read_bytes())
                entry = replace(entry, scalars=group.scalars, trajectories=file, index=index, record_bytes=size)
            written.append(entry)
    write_groups(directory / GROUPS_FILE, bounds, written)
    return (*saved.files, saved_file(directory, RECORDS_FILE), saved_file(directory, GROUPS_FILE))


def load_groups(
    stream: TaskStream,
    directory: Path,
    files: Sequence[SavedFile],
    bounds: Bounds,
    task_of: Callable[[int, int, int], RolloutTask],
) -> list[tuple[Group, str]]:
    """Return the groups with their states, in the order of saving. `task_of` builds a task from a group's number, row
    and version. Groups that were running continue from the checkpoint's journals.

    Raises: DamagedCheckpointError; CheckpointError if they cannot be trained under `bounds`.
    """
    # Before anything is parsed: a damaged file could fail there in any way.
    check_files(directory, files)
    saved_bounds, saved = read_groups(directory / GROUPS_FILE)
    bounds.require(saved_bounds)
    chunks = _restored(stream, directory, saved, task_of)
    journals = tuple(str(directory / file.name) for file in files if file.name.endswith(JOURNAL))
    loaded = []
    with (directory / RECORDS_FILE).open("rb") as records:
        for entry in saved:
            task = task_of(entry.number, entry.row, entry.version)
            # Running groups are submitted again; the journals provide the tokens that were already sampled.
            if entry.state == RUNNING:
                loaded.append((Group(replace(task, journals=journals), entry.version), entry.state))
                continue
            Path(str(task.records)).parent.mkdir(parents=True, exist_ok=True)
            Path(str(task.records)).write_bytes(records.read(entry.record_bytes))
            assert entry.scalars is not None
            loaded.append((Group(task, entry.version, (chunks[entry.number], entry.scalars)), entry.state))
    return loaded


def _restored(
    stream: TaskStream, directory: Path, saved: Sequence[SavedGroup], task_of: Callable[[int, int, int], RolloutTask]
) -> dict[int, BuffersRef]:
    """Return the trajectories of finished groups, by number."""
    # A file holds its trajectories in the order of `index`.
    by_file: dict[str, list[SavedGroup]] = {}
    for group in sorted((group for group in saved if group.trajectories), key=lambda group: group.index):
        by_file.setdefault(group.trajectories, []).append(group)
    chunks: dict[int, BuffersRef] = {}
    for file, groups in by_file.items():
        made = [(task_of(g.number, g.row, g.version), g.scalars) for g in groups if g.scalars is not None]
        restored = stream.restore(directory / file, made)
        chunks |= {group.number: chunk for group, chunk in zip(groups, restored, strict=True)}
    return chunks
