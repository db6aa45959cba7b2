"""rollouts/step_<n>.jsonl: engines write parts, the collector joins them under the final name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def part_path(directory: Path, name: str, batch: int, engine: int) -> str:
    """Where one engine writes what one task produced; hidden until joined."""
    return str(directory / f".{name}.{batch}.{engine}.part")


def join_parts(parts: Sequence[str], directory: Path, name: str) -> None:
    """Concatenates the parts, in order, into `<name>.jsonl`, atomically, and removes them."""
    temporary = directory / f".{name}.joined"
    with open(temporary, "wb") as target:
        for part in parts:
            with open(part, "rb") as source:
                shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, directory / f"{name}.jsonl")
    for part in parts:
        os.unlink(part)


def amend_part(part: str, rewards: np.ndarray, accuracies: np.ndarray, scores: Mapping[str, np.ndarray]) -> None:
    """Puts the final rewards, and the scores that are in them, into a part, atomically.

    Shapes: [B], in the order of the lines.
    """
    temporary = f"{part}.amended"
    with open(part, encoding="utf-8") as source, open(temporary, "w", encoding="utf-8") as target:
        for index, line in enumerate(source):
            record = json.loads(line)
            record |= {"reward": float(rewards[index]), "accuracy": float(accuracies[index])}
            record["scores"] = {name: float(values[index]) for name, values in scores.items()}
            target.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(temporary, part)


def remove_after(directory: Path, step: int) -> None:
    """Forgets the responses of steps after `step`, and what a crash left unjoined (a resumed run writes them again)."""
    for path in directory.glob(".*"):
        path.unlink()
    for path in directory.glob("*step_*.jsonl"):
        if int(path.stem.rpartition("_")[2]) > step:
            path.unlink()
