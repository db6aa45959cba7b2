"""Saving and loading of groups that no step has trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.rollout.streaming.interface import JOURNAL, Group, TaskStream
from mcore_rl.rollout.streaming.saved import (
    GROUPS_FILE,
    RECORDS_FILE,
    RUNNING,
    Bounds,
    SavedGroup,
    check_files,
    read_groups,
    saved_file,
    write_groups,
)
from mcore_rl.types import BuffersRef, RolloutTask, SavedFile
from model_converters.durable_files import durable_write


def save_groups(
    stream: TaskStream, directory: Path, bounds: Bounds, groups: Sequence[tuple[int | None, Group, str]]
) -> tuple[SavedFile, ...]:
    """Write groups, each with its ticket if it is running, and its state. File names are relative to `directory`.

    Raises: OSError.
    """
    tickets = [ticket for ticket, _, _ in groups if ticket is not None]
    ended = [group for ticket, group, _ in groups if ticket is None]
    saved = stream.save(directory, [group.result[0] for group in ended if group.result is not None], tickets)
    sizes = _copy_records(directory / RECORDS_FILE, [Path(str(group.task.records)) for group in ended])
    places = iter(zip(saved.places, sizes, strict=True))
    written = []
    for ticket, group, state in groups:
        entry = SavedGroup(group.number, int(group.task.prompt_rows[0]), group.version, state)
        if ticket is None:
            (file, index), record_bytes = next(places)
            entry = replace(entry, scalars=group.scalars, trajectories=file, index=index, record_bytes=record_bytes)
        written.append(entry)
    write_groups(directory / GROUPS_FILE, bounds, written)
    return (*saved.files, saved_file(directory / RECORDS_FILE), saved_file(directory / GROUPS_FILE))


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
    by_file: dict[str, list[SavedGroup]] = {}
    for group in sorted(saved, key=lambda group: group.index):
        if group.trajectories:
            by_file.setdefault(group.trajectories, []).append(group)
    chunks: dict[int, BuffersRef] = {}
    for file, groups in by_file.items():
        made = [(task_of(g.number, g.row, g.version), g.scalars) for g in groups if g.scalars is not None]
        restored = stream.restore(directory / file, made)
        chunks |= {group.number: chunk for group, chunk in zip(groups, restored, strict=True)}
    return chunks


def _copy_records(path: Path, parts: Sequence[Path]) -> list[int]:
    """Concatenate the records of finished groups; returns the bytes of each."""
    sizes = []
    with durable_write(path) as file:
        for part in parts:
            content = part.read_bytes()
            file.write(content)
            sizes.append(len(content))
    return sizes
