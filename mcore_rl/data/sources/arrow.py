"""Row readers for parquet files and for directories saved by `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.data.json_text import parse_json
from mcore_rl.data.sources.paths import STATE_FILE
from mcore_rl.errors import DataError

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, object]
Rows = Iterator[tuple[str, Row]]
_PARQUET_BATCH_ROWS = 1024


def read_parquet(path: Path, key: str) -> Rows:
    """Yield (place, row) like files.read_rows.

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

    Rows are equal to the rows of `datasets`, except that features are not decoded: a class label is its number.

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
