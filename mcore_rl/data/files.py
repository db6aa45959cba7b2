"""Reads rows from jsonl and parquet files, one at a time, each with its place for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_rl.errors import DataError

_PARQUET_BATCH_ROWS = 1024


def read_rows(path: str | Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, row): place is "<file>, line 12" or "<file>, row 12", both counted from 1.

    Blank lines of a jsonl file are not rows. `key` is the configuration key that errors name.

    Raises: DataError for a file that is missing, not a file, of another kind, or malformed.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{key}: there is no file {path}; set {key} to a .jsonl or .parquet file")
    if not path.is_file():
        raise DataError(f"{key}: {path} is not a file; set {key} to a .jsonl or .parquet file")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(f"{key}: {path} is neither .jsonl nor .parquet; convert it and set {key} to the result")
    return readers[path.suffix](path, key)


def _read_jsonl(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, _parse(line, place, key)
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read: {error.strerror}") from error


def _parse(line: bytes, place: str, key: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # both malformed JSON and bytes that are not UTF-8
        raise DataError(f"{key}: {place} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{key}: {place} is not a JSON object")
    return row


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{key}: {path} is not a readable parquet file (after row {number}): {error}") from error
