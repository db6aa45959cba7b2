"""metrics.jsonl: one JSON object per step, durable before the next step starts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.errors import DataError
from model_converters.durable_files import durable_write

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Log of run_dir/metrics.jsonl. Opening it removes an incomplete last line, left by a crash."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_incomplete_line(self.path)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
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
        records = self.read()
        kept = [record for record in records if record["step"] <= step]
        if len(kept) < len(records):
            _write(target, [record for record in records if record["step"] > step])
            _write(self.path, kept)

    def read(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)


def _write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with durable_write(path) as file:
        file.writelines(json.dumps(record).encode() + b"\n" for record in records)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the complete records of a metrics.jsonl in order; [] if the file does not exist.

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
        records.append(record)
    return records


def _plain(value: Any) -> Any:
    """Convert numpy scalars to Python numbers, and numbers that are not finite to None: JSON has no NaN."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _remove_incomplete_line(path: Path) -> None:
    if not path.is_file():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)
