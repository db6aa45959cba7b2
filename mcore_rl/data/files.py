"""Row readers for jsonl, parquet and CSV files and directories saved by `datasets`; rows come with their location."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.data.json_text import LoneSurrogateError, parse_json
from mcore_rl.data.sources.paths import STATE_FILE, Names, find_files, is_saved_dataset
from mcore_rl.errors import DataError

if TYPE_CHECKING:
    import pyarrow

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
    except DataError as error:
        return isinstance(error, LoneSurrogateError)
    return False


def _further(lines: list[int]) -> str:
    """Return the number of further lines with the same problem, and the first _NAMED_LINES line numbers."""
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
    """Yield the place of each record's first line, and its cells. Blank lines are skipped."""
    # The csv module limits cells to 131,072 characters, for the whole process; prompts may be longer.
    csv.field_size_limit(sys.maxsize)
    place = f"{path}, line 1"
    try:
        with path.open("rb") as lines:
            # Decode line by line, so that an error can name its line.
            numbered = enumerate(lines, start=1)
            texts = (_decode(line, f"{key}: {path}, line {number} is not valid CSV:") for number, line in numbered)
            # Without `strict`, text after a closing quote is joined to the cell.
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


Row = dict[str, object]
Rows = Iterator[tuple[str, Row]]
_PARQUET_BATCH_ROWS = 1024


def read_parquet(path: Path, key: str) -> Rows:
    """Yield (place, row) like read_rows.

    Raises: DataError.
    """
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for row in _to_rows(batch, path, key, number):
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{key}: {path} is not a readable parquet file (after row {number}): {error}") from error


def read_saved_dataset(path: Path, key: str) -> Rows:
    """Yield (place, row) of a directory saved by `datasets`; rows are counted from 1 over all of its files.

    Rows equal the rows of `datasets`, except that features are not decoded: a class label stays a number.

    Raises: DataError.
    """
    import pyarrow
    import pyarrow.ipc

    names, columns = _described(path, key)
    number = 0
    for name in names:
        file = path / name
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    shown = batch if columns is None else batch.select(columns)
                    for row in _to_rows(shown, path, key, number):
                        number += 1
                        yield f"{path}, row {number}", row
        except (pyarrow.ArrowException, OSError, KeyError) as error:
            raise DataError(
                f"{key}: {file} is not a readable file of a saved set (after row {number}): {error}; save it again"
            ) from error


def _described(path: Path, key: str) -> tuple[list[str], list[str] | None]:
    """Return the files of a saved set in order, and its selected columns; None: all."""
    file = path / STATE_FILE
    try:
        state: Any = parse_json(file.read_text(encoding="utf-8"), f"{key}: {file}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}: {file} cannot be read: {error}") from error
    try:
        names, columns = [str(each["filename"]) for each in state["_data_files"]], state.get("_format_columns")
    except (AttributeError, KeyError, TypeError):
        raise DataError(f"{key}: {file} does not list files in the format of `datasets`; save the set again") from None
    if state.get("_indices_data_files") or state.get("_indices_files"):  # `datasets` 1 stored a selection as indices
        raise DataError(
            f"{key}: {path} is a selection saved by an old version; save it again with `datasets` 2 or later"
        )
    return names, None if columns is None else [str(column) for column in columns]


def _to_rows(batch: pyarrow.RecordBatch, path: Path, key: str, before: int) -> list[Row]:
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        # Find the first invalid value, to name its row and column.
        for index in range(batch.num_rows):
            for column in batch.schema.names:
                try:
                    batch.column(column)[index].as_py()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{key}: {path}, row {before + index + 1}: column {column!r} is not UTF-8 ({error.reason});"
                        " write the file again with text"
                    ) from None
        raise
