"""Row reader for jsonl, parquet and CSV files and saved data sets; each row comes with its location for errors."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.data.json_text import LoneSurrogateError, parse_json
from mcore_rl.data.sources.arrow import Row, Rows, read_parquet, read_saved_dataset
from mcore_rl.data.sources.paths import Names, find_files, is_saved_dataset
from mcore_rl.errors import DataError

_NAMED_LINES = 5
_QUOTING = 'enclose cells that contain a comma, a quote or a line break in double quotes ("), and write " as ""'


def read_rows(names: Names, key: str) -> Rows:
    """Yield (place, row) of all files in order. `place` is "<file>, line 12" or "<file>, row 12", counted from 1.

    Blank lines of a jsonl or CSV file are skipped. The first line of a CSV file names the columns; values are strings,
    and an empty cell is None. `key` is the configuration key that errors name.

    Raises: DataError, immediately for the errors of find_files, during iteration for a malformed row.
    """
    files = find_files(names, key)
    return (row for path in files for row in _read_file(path, key))


def _read_file(path: Path, key: str) -> Rows:
    if is_saved_dataset(path):
        return read_saved_dataset(path, key)
    return {".jsonl": _read_jsonl, ".parquet": read_parquet, ".csv": _read_csv}[path.suffix](path, key)


def _read_jsonl(path: Path, key: str) -> Rows:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                place = f"{path}, line {number}"
                try:
                    row = _parse(line, f"{key}: {place}")
                except LoneSurrogateError as error:
                    # Read on, so that one message names all lines with this problem.
                    also = [n for n, other in enumerate(lines, start=number + 1) if _has_lone_surrogate(other)]
                    raise DataError(f"{error}{_further(also)}") from None
                yield place, row
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read: {error.strerror}") from error


def _parse(line: bytes, where: str) -> Row:
    row = parse_json(_decode(line, f"{where} is not valid JSON:"), where)
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object")
    return row


def _decode(line: bytes, problem: str) -> str:
    try:
        # Concatenated files can have a byte order mark in any line.
        return line.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = f"{error.object[error.start]:#04x} is byte {error.start + 1} of the line"
        raise DataError(f"{problem} it is not UTF-8 ({byte}); convert the file to UTF-8") from None


def _has_lone_surrogate(line: bytes) -> bool:
    try:
        _parse(line, "")
    except LoneSurrogateError:
        return True
    except DataError:
        pass
    return False


def _further(lines: list[int]) -> str:
    """Name all lines with the same problem, so that a file can be corrected at once."""
    if not lines:
        return ""
    named = ", ".join(map(str, lines[:_NAMED_LINES])) + (", ..." if len(lines) > _NAMED_LINES else "")
    return f" (the same in {len(lines)} further lines: {named})"


def _read_csv(path: Path, key: str) -> Rows:
    names: list[str] | None = None
    for place, cells in _csv_records(path, key):
        where = f"{key}: {place}"
        if names is None:
            names = _header(cells, where)
        elif len(cells) != len(names):
            raise DataError(f"{where} has {len(cells)} cells, but the file has {len(names)} columns; {_QUOTING}")
        else:
            yield place, {name: cell or None for name, cell in zip(names, cells, strict=True) if name}


def _csv_records(path: Path, key: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the first line and the cells of each record, except blank lines."""
    # The csv module limits cells to 131,072 characters, for the whole process; prompts may be longer.
    csv.field_size_limit(sys.maxsize)
    place = f"{path}, line 1"
    try:
        with path.open("rb") as lines:
            numbered = enumerate(lines, start=1)
            texts = (_decode(line, f"{key}: {path}, line {number} is not valid CSV:") for number, line in numbered)
            records = csv.reader(texts, strict=True)
            for cells in records:
                if cells:
                    yield place, cells
                place = f"{path}, line {records.line_num + 1}"
    except csv.Error as error:
        raise DataError(f"{key}: {place} is not valid CSV: {error}; {_QUOTING}") from error
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read: {error.strerror}") from error


def _header(values: list[str], where: str) -> list[str]:
    """Return the column names. A column without a name, such as a saved index, is ignored later."""
    names = [value.strip() for value in values]
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise DataError(f"{where} repeats column names: {', '.join(twice)}; the first line of a CSV file names columns")
    return names
