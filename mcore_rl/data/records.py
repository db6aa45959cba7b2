"""Files rollouts/step_<n>.jsonl: engines write parts, and the collector joins them under the final name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mcore_rl.types.json import JsonObject
from model_converters.durable_files import durable_write

FIELDS = ".fields"
SURROGATE_ERRORS = "backslashreplace"
"""Error handler of the files' encoding. Graders may return unpaired surrogates, which UTF-8 cannot represent: they are
written as JSON escapes and read back unchanged."""


def part_path(directory: Path, name: str, batch: int, task: int) -> str:
    """Return the hidden file for the records of one task. A task that is restarted on another engine overwrites it."""
    return str(directory / f".{name}.{batch}.{task}.part")


def join_parts(parts: Sequence[str], directory: Path, name: str) -> None:
    """Concatenate the parts, in order, into `<name>.jsonl` atomically, and remove them."""
    with durable_write(directory / f"{name}.jsonl") as target:
        _append(parts, target)
    _remove(parts)


def piece_path(part: str, first: int) -> str:
    """Return the file for the records of a task from response `first` on."""
    return f"{part}.{first}" if first else part


def join_pieces(part: str, firsts: Sequence[int]) -> None:
    """Append the pieces of a task that several engines wrote to its first piece, which has the part's name, and remove
    them."""
    assert firsts[0] == 0, f"the pieces {firsts} of {part} do not begin with the first response"
    pieces = [piece_path(part, first) for first in firsts[1:]]
    # Neither atomic nor durable: after a crash the step is generated again. A step of 64 engines has at least as many
    # tasks in pieces, and waiting for the disk takes several milliseconds.
    with open(part, "ab") as target:
        _append(pieces, target)
    _remove(pieces)


def _append(sources: Sequence[str], target: BinaryIO) -> None:
    for name in sources:
        with open(name, "rb") as source:
            shutil.copyfileobj(source, target)


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        os.unlink(path)


def add_fields(part: str, lines: Sequence[int], fields: Sequence[Mapping[str, object]]) -> None:
    """Store additional fields for lines of a part, until amend_part merges them.

    Several processes may call this concurrently for different lines.
    """
    with open(f"{part}.{lines[0]}{FIELDS}", "w", encoding="utf-8", errors=SURROGATE_ERRORS) as file:
        for line, line_fields in zip(lines, fields, strict=True):
            file.write(json.dumps([line, line_fields], ensure_ascii=False) + "\n")


def _take_fields(part: str) -> dict[int, JsonObject]:
    """Load and remove the fields that add_fields stored. Returns line -> fields."""
    fields_by_line: dict[int, JsonObject] = {}
    for path in Path(part).parent.glob(f"{Path(part).name}.*{FIELDS}"):
        with open(path, encoding="utf-8") as source:
            fields_by_line |= dict(map(json.loads, source))
        path.unlink()
    return fields_by_line


def amend_part(part: str, rewards: np.ndarray, accuracies: np.ndarray, scores: Mapping[str, np.ndarray]) -> None:
    """Write the final rewards, their component scores and the fields of add_fields into a part, atomically.

    Shapes: [B], in the order of the lines.
    """
    temporary, fields = f"{part}.amended", _take_fields(part)
    with (
        open(part, encoding="utf-8") as source,
        open(temporary, "w", encoding="utf-8", errors=SURROGATE_ERRORS) as target,
    ):
        for index, line in enumerate(source):
            record = json.loads(line)
            record |= {"reward": float(rewards[index]), "accuracy": float(accuracies[index])}
            record["scores"] = {name: float(values[index]) for name, values in scores.items()}
            record |= fields.get(index, {})
            target.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(temporary, part)


def remove_unjoined(directory: Path) -> None:
    """Remove the files of unfinished steps after a crash."""
    # Every file of an unfinished step starts with a dot (part_path and the names derived from it).
    for path in directory.glob(".*"):
        path.unlink()
