"""metrics.jsonl: one JSON object per step, durable before the next step starts. If a resumed run repeats steps, their
earlier records are moved to earlier/<n>/ in the run directory."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mcore_rl.config.observe import TOKEN_VALUES, TRAJECTORIES
from mcore_rl.errors import DataError
from model_converters.durable_files import durable_write

FILE_NAME = "metrics.jsonl"
FOLDER = "earlier"
TIMELINE, TENSORBOARD, TRACKERS, ROLLOUTS = "timeline.json", "tensorboard", "trackers", "rollouts"
_OF_STEP = re.compile(r"(?:.*_)?step_(\d+)(?:\.jsonl)?")


class MetricsLog:
    """Log of run_dir/metrics.jsonl. Opening it removes an incomplete last line, left by a crash."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.is_file() else b""
        complete = content.rfind(b"\n") + 1
        # A crash in `append` leaves a line without a newline.
        if complete < len(content):
            os.truncate(self.path, complete)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Append {"step": step, **values} durably; values that are not finite become null."""
        line = json.dumps({"step": int(step), **{key: _plain(value) for key, value in values.items()}}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            # On disk before the next step starts.
            os.fsync(file.fileno())

    def move_after(self, step: int, target: Path) -> None:
        """Move records after `step`, which a resumed run writes again, to the new file `target`.

        They are durable in `target` before they are removed here.
        """
        lines = self.path.read_bytes().splitlines(keepends=True)
        is_later = [record["step"] > step for record in self.read()]
        # Write the target first: a crash between the two writes duplicates records instead of losing them.
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


def set_aside(run_dir: Path, step: int) -> Path | None:
    """Move records of steps after `step` (-1: all) to a new earlier/<n>/ with the layout of the run directory.
    Trajectories of these steps are removed: they are large, and metrics.jsonl will have other metrics of the steps.

    Timeline and the files of trackers continue after a resume; they are moved only if the run starts from the
    beginning. Trackers then begin a new run, because the ids of the earlier one are moved too.

    Returns: the new directory; None if there are no such records.
    """
    for path in (run_dir / TRAJECTORIES).glob("step_*"):
        if _step_of(path) > step:
            shutil.rmtree(path)
    metrics = MetricsLog(run_dir)
    folders = (run_dir / ROLLOUTS, run_dir / TOKEN_VALUES)
    rollouts = [path for folder in folders for path in folder.glob("*.jsonl") if _step_of(path) > step]
    has_later = any(record["step"] > step for record in metrics.read())
    if not has_later and not rollouts:
        return None
    outputs = (TIMELINE, TENSORBOARD, TRACKERS) if step < 0 else ()
    whole = [path for name in outputs if (path := run_dir / name).exists()]
    taken = [int(path.name) for path in (run_dir / FOLDER).glob("*") if path.name.isdigit()]
    target = run_dir / FOLDER / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    for path in [*whole, *rollouts]:
        kept = target / path.relative_to(run_dir)
        kept.parent.mkdir(exist_ok=True)
        os.rename(path, kept)
    # Must come last: after an interruption, the next start finds these records and moves the rest.
    if has_later:
        metrics.move_after(step, target / FILE_NAME)
    return target


def _step_of(path: Path) -> int:
    match = _OF_STEP.fullmatch(path.name)
    return int(match[1]) if match else -1
