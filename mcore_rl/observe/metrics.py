"""metrics.jsonl: one JSON object per step, durable before the next step starts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mcore_rl.errors import DataError
from model_converters.durable_files import durable_write

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Log of run_dir/metrics.jsonl. Opening it removes an incomplete last line, left by a crash."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_incomplete_line(self.path)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Append {"step": step, **values} durably; values that are not finite become null."""
        line = json.dumps({"step": int(step), **{key: _plain(value) for key, value in values.items()}}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def holds_after(self, step: int) -> bool:
        """Return whether there are records of steps after `step`."""
        return any(record["step"] > step for record in self.read())

    def move_after(self, step: int, target: Path) -> None:
        """Move records after `step`, which a resumed run writes again, to the new file `target`.

        They are durable in `target` before they are removed here.
        """
        if not self.holds_after(step):
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        is_later = [record["step"] > step for record in self.read()]
        for path, chosen in ((target, True), (self.path, False)):
            with durable_write(path) as file:
                file.writelines(line for line, later in zip(lines, is_later, strict=True) if later is chosen)

    def read(self) -> list[dict[str, float]]:
        return read_metrics(self.path)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read the complete records of a metrics.jsonl in order, without null values; [] if the file does not exist.

    A last line without a newline is ignored: it is being written, or a crash interrupted it.

    Raises: DataError with the line of an invalid record.
    """
    path = Path(path)
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not valid JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise DataError(f"{path}, line {number} is not an object with a `step`")
        records.append({key: value for key, value in record.items() if value is not None})
    return records


def _plain(value: float | np.generic) -> float | None:
    """Convert numpy scalars to Python numbers, and numbers that are not finite to None: JSON has no NaN."""
    number: float = value.item() if isinstance(value, np.generic) else value
    return number if math.isfinite(number) else None


def _remove_incomplete_line(path: Path) -> None:
    if not path.is_file():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)
