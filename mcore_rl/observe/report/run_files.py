"""Tolerant reading of a run directory: runs in progress, interrupted writes, and files of newer versions."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import yaml

from mcore_rl.errors import ConfigError
from mcore_rl.observe.metrics import FILE_NAME, FOLDER, ROLLOUTS
from mcore_rl.types.json import JsonObject

CONFIG = "config.yaml"
FAILURE = "failure.txt"
"""The error that ended the last start; absent if none did."""
MAX_FAILURE = 4000
"""Characters of the error that are shown."""
MAX_NUMBER = 1e100
"""Larger numbers count as infinite, so that sums and squares of them cannot exceed the range of floats."""
SECRETS = "slurm.environment"
"""Mapping whose values may be secrets; reports are shared, so they name its keys only."""
_RESPONSES = re.compile(r"(val_)?step_(\d+)\.jsonl")


@dataclass(frozen=True)
class RolloutFile:
    """Responses of one step. `is_validation`: generated for validation, after the step."""

    path: Path
    step: int
    is_validation: bool


@dataclass
class RunFiles:
    """Contents of a run directory, without responses and timeline.

    records: metrics by step, in order; null (a value that was not finite) is None.
    config: flattened configuration, {"actor.optimizer.lr": 1e-6}; {} if it cannot be read.
    notes: parts that could not be read, for the report's table of warnings.
    failure: error that ended the last start.
    """

    directory: Path
    records: dict[int, dict[str, float | None]] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    rollouts: list[RolloutFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def total_steps(self) -> int | None:
        steps = self.config.get("trainer.steps")
        return steps if isinstance(steps, int) else None

    def known_records(self) -> list[dict[str, float]]:
        """Return the records with `step` and without null values, the form of read_metrics."""
        return [
            {"step": step, **{name: value for name, value in values.items() if value is not None}}
            for step, values in self.records.items()
        ]

    @property
    def num_earlier(self) -> int:
        """Number of folders with records that a resumed run has repeated."""
        return sum(path.name.isdigit() for path in (self.directory / FOLDER).glob("*"))


def read_run(directory: Path) -> RunFiles:
    """Read metrics and configuration, and list the files with responses.

    Raises: ConfigError if `directory` is not a run directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name a run.dir")
    if not any((directory / name).exists() for name in (CONFIG, FILE_NAME, ROLLOUTS)):
        raise ConfigError(f"{directory} is no run: it has no {CONFIG}, {FILE_NAME} or {ROLLOUTS}/; name a run.dir")
    run = RunFiles(directory)
    for record in json_lines(directory / FILE_NAME, run.notes):
        if (step := _whole(record.get("step"))) is None:
            run.notes.append(f"{FILE_NAME}: a line without a step is left out")
        else:
            # A step that occurs twice was repeated by a resumed run.
            run.records[step] = {name: finite(value) for name, value in record.items() if _is_metric(name, value)}
    run.records = dict(sorted(run.records.items()))
    run.config = read_config(directory / CONFIG, run.notes)
    run.failure = _failure(directory / FAILURE)
    files = _rollout_files(directory / ROLLOUTS, run.notes)
    run.rollouts = sorted(files, key=lambda file: (file.step, file.is_validation))
    return run


def _failure(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_FAILURE)
    except OSError:
        return None


def json_lines(path: Path, notes: list[str], *, last_bytes: int | None = None) -> Iterator[JsonObject]:
    """Yield the JSON objects of a file, one per line; nothing if it does not exist. last_bytes: only complete lines in
    the last bytes of the file.

    Other lines are counted in `notes`, except a last line without a newline, which is being written.
    """
    invalid, name = 0, path.name if path.name == FILE_NAME else "/".join(path.parts[-2:])
    try:
        with path.open("rb") as file:
            if last_bytes is not None:
                _skip_to_last(file, last_bytes)
            for line in file:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    invalid += line.endswith(b"\n")
                    continue
                if isinstance(record, dict):
                    yield record
                else:
                    invalid += 1
    # Files of a run in progress can be renamed or moved to earlier/.
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{name} cannot be read: {error.strerror}")
    if invalid:
        notes.append(f"{name}: lines that are not JSON objects are left out ({invalid})")


def _skip_to_last(file: BinaryIO, num_bytes: int) -> None:
    """Go to the first line that begins in the last `num_bytes` of the file."""
    # One byte before: if it is a newline, the line after it is complete.
    start = file.seek(0, os.SEEK_END) - num_bytes - 1
    file.seek(max(start, 0))
    if start >= 0:
        file.readline()


def _rollout_files(directory: Path, notes: list[str]) -> Iterator[RolloutFile]:
    try:
        for path in directory.iterdir():
            if match := _RESPONSES.fullmatch(path.name):
                yield RolloutFile(path, int(match[2]), match[1] is not None)
    except FileNotFoundError:  # before the first step
        return
    except OSError as error:
        notes.append(f"{ROLLOUTS}/ cannot be read: {error.strerror}")


def read_config(path: Path, notes: list[str]) -> dict[str, object]:
    """Read a config.yaml as {"actor.optimizer.lr": 1e-6}, without the values of SECRETS.

    If it cannot be read, the result is {} and the reason is added to `notes`.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        return dict(_leaves(tree)) if isinstance(tree, dict) else {}
    except FileNotFoundError:
        notes.append(f"{path.name} does not exist: the configuration is unknown")
    # RecursionError: deep nesting, or an alias within the value that it stands for.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {' '.join(str(error).split())}")
    return {}


def _leaves(tree: dict[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if f"{prefix}{name}" == SECRETS:
            yield SECRETS, sorted(map(str, value)) if isinstance(value, dict) else None
        elif isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: object) -> object:
    """Return a value that JSON can represent: YAML also has dates, bytes, sets and numbers that are not finite."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, int):
        # Python does not format integers of thousands of digits.
        return value if value.bit_length() <= 64 else hex(value)
    if value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _is_metric(name: str, value: object) -> bool:
    return name != "step" and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))


def finite(value: object) -> float | None:
    """Return a number of JSON as a float; None for NaN, beyond MAX_NUMBER, and for other values. JSON has integers
    beyond the range of floats."""
    # An integer is compared exactly; NaN compares as False.
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_NUMBER else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
