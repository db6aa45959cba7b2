"""rollouts/step_<n>.jsonl: engines write parts, the collector joins them under the final name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model_converters.durable_files import durable_write

FIELDS = ".fields"
SURROGATE_ERRORS = "backslashreplace"
"""Graders may hand over half of a surrogate pair, which UTF-8 does not have: it is written as the escape that JSON has
for it, and comes back as it was."""


def part_path(directory: Path, name: str, batch: int, task: int) -> str:
    """Where an engine writes what one task produced; hidden until joined. One that begins anew elsewhere writes it
    anew."""
    return str(directory / f".{name}.{batch}.{task}.part")


def join_parts(parts: Sequence[str], directory: Path, name: str) -> None:
    """Concatenates the parts, in order, into `<name>.jsonl`, atomically, and removes them."""
    _join(parts, directory / f"{name}.jsonl")


def piece_path(part: str, first: int) -> str:
    """Where an engine writes what it produced of a task from response `first` on."""
    return f"{part}.{first}" if first else part


def join_pieces(part: str, firsts: Sequence[int]) -> None:
    """Makes the part of a task of what several engines have written, in order, atomically, and removes the pieces."""
    _join([piece_path(part, first) for first in firsts], Path(part))


def _join(sources: Sequence[str], path: Path) -> None:
    with durable_write(path) as target:
        for name in sources:
            with open(name, "rb") as source:
                shutil.copyfileobj(source, target)
    for name in sources:
        if name != str(path):
            os.unlink(name)


def add_fields(part: str, lines: Sequence[int], fields: Sequence[Mapping[str, Any]]) -> None:
    """Keeps further fields of some lines of a part until it is amended. Processes may do so beside each other, each for
    lines of its own."""
    with open(f"{part}.{lines[0]}{FIELDS}", "w", encoding="utf-8", errors=SURROGATE_ERRORS) as file:
        for line, line_fields in zip(lines, fields, strict=True):
            file.write(json.dumps([line, line_fields], ensure_ascii=False) + "\n")


def _take_fields(part: str) -> dict[int, dict[str, Any]]:
    """What add_fields has kept, by line."""
    fields_by_line: dict[int, dict[str, Any]] = {}
    for path in Path(part).parent.glob(f"{Path(part).name}.*{FIELDS}"):
        with open(path, encoding="utf-8") as source:
            fields_by_line |= dict(map(json.loads, source))
        path.unlink()
    return fields_by_line


def amend_part(part: str, rewards: np.ndarray, accuracies: np.ndarray, scores: Mapping[str, np.ndarray]) -> None:
    """Puts the final rewards, the scores that are in them, and what add_fields has kept, into a part, atomically.

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
    """Removes what a crash left of steps that had not ended."""
    for path in directory.glob(".*"):
        path.unlink()
