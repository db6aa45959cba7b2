"""Format of groups that no step has trained, in a checkpoint.

groups.json        all groups: prompt, number, version, state; of finished ones also the scalars and the place of their
trajectories
records.jsonl      records of finished groups, in the order of groups.json
*.npz, *.journal   trajectories of finished groups, and sampled tokens of running ones, by engine
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.data.checksum import file_crc32
from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.types import RolloutScalars, SavedFile, SavedState
from model_converters.durable_files import durable_write

GROUPS_FILE, RECORDS_FILE = "groups.json", "records.jsonl"
RUNNING, UNSCORED, FINISHED, ZERO_VARIANCE = "running", "unscored", "finished", "dull"
ARRAY = "array"
SAVED_NAMES = {"episode_metrics": "figures"}
"""Renamed fields: current name -> name in groups.json, so that checkpoints of earlier versions stay readable."""


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
    trainer.prompts_per_step and rollout.samples_per_prompt."""

    max_staleness: int
    max_staleness_hard: int
    prompts_per_step: int
    samples_per_prompt: int

    def require(self, saved: Bounds) -> None:
        """Check that groups of `saved` can be trained under these bounds.

        Raises: CheckpointError naming a key that was lowered: existing groups could no longer be trained in time.
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
        if self.samples_per_prompt != saved.samples_per_prompt:
            raise CheckpointError(
                f"the checkpoint has groups with rollout.samples_per_prompt={saved.samples_per_prompt}, but this run "
                f"has {self.samples_per_prompt}: restore the value"
            )


@dataclass(frozen=True)
class CompletedSave:
    """PendingSave of files that already exist."""

    files: tuple[SavedFile, ...]

    def done(self) -> bool:
        return True

    def result(self) -> SavedState:
        return SavedState(self.files, {})


def write_groups(path: Path, bounds: Bounds, groups: Sequence[SavedGroup]) -> None:
    """Write groups.json durably.

    Raises: OSError.
    """
    content = {"bounds": vars(bounds), "groups": [_as_json(group) for group in groups]}
    with durable_write(path) as file:
        file.write(json.dumps(content).encode())


def read_groups(path: Path) -> tuple[Bounds, list[SavedGroup]]:
    """Read groups.json, whose checksum has been verified.

    Raises: CheckpointError if another version with different fields wrote it.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
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
        crc = file_crc32(directory / file.name)
        if (crc.num_bytes, crc.value) != (file.num_bytes, file.crc32):
            raise DamagedCheckpointError(
                f"{directory.parent} is damaged: {directory.name}/{file.name} has another checksum than was saved"
            )


def _as_json(group: SavedGroup) -> dict[str, Any]:
    scalars = group.scalars
    if scalars is None:
        return {**vars(group), "scalars": None}
    names = [field.name for field in fields(scalars)]
    saved = {SAVED_NAMES.get(name, name): _plain(getattr(scalars, name)) for name in names}
    return {**vars(group), "scalars": saved}


def _from_json(given: dict[str, Any]) -> SavedGroup:
    scalars = given.pop("scalars")
    return SavedGroup(**given, scalars=None if scalars is None else _scalars_of(scalars))


def _scalars_of(given: dict[str, Any]) -> RolloutScalars:
    field_names = {saved: name for name, saved in SAVED_NAMES.items()}
    plain = {field_names.get(name, name): _restored(value) for name, value in given.items()}
    pairs = {name: tuple((first, second) for first, second in given[name]) for name in ("errors", "version_tokens")}
    return RolloutScalars(**plain | pairs)


def _plain(value: Any) -> Any:
    """Convert arrays to JSON values with their type; JSON preserves float32, float64 and NaN exactly."""
    if isinstance(value, np.ndarray):
        return {ARRAY: value.dtype.str, "values": value.tolist()}
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict) and ARRAY in value:
        return np.array(value["values"], np.dtype(value[ARRAY]))
    if isinstance(value, dict):
        return {name: _restored(entry) for name, entry in value.items()}
    return value
