"""Resolution of data.train and data.val to files: paths, globs, directories of shards and saved data sets.

This module has no slow imports, so that a missing file is reported within the first second of a run.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.config.reading.expansion import check_utf8
from mcore_rl.errors import ConfigError, DataError

KINDS = (".jsonl", ".parquet", ".csv")
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
_KINDS = ".jsonl, .parquet or .csv"
# Matches test-00000-of-00002.parquet and train.jsonl, but not testimonials.jsonl.
_SPLIT = re.compile(r"(train|training|test|testing|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
_NAMED_FILES = 5

Names = str | Path | Sequence[str | Path]
"""One path or glob, or several."""


def find_files(names: Names, key: str) -> tuple[Path, ...]:
    """Return all files of `names`, in order; files of a glob or a directory are sorted by name.

    A directory saved by `datasets` counts as one file. `key` is the configuration key that errors name.

    Raises: DataError for a name without a file, an unsupported kind of file, and a file that is named twice.
    """
    listed = [names] if isinstance(names, str | Path) else names
    if not listed:
        raise DataError(f"{key} is an empty list; set it to a {_KINDS} file")
    files: dict[Path, str | Path] = {}
    for name in listed:
        for path in _expand(name, key):
            check_utf8(key, str(path))
            if path in files:
                raise DataError(
                    f"{key} names {path} twice, by {files[path]} and by {name}; name it once, and use data.weights to "
                    "sample its rows more often"
                )
            files[path] = name
    return tuple(files)


def file_weights(weights: Mapping[str, float], names: Names) -> tuple[float, ...] | None:
    """Return the weight of each file of data.train=`names`, 1 for unlisted files; None if data.weights is empty.

    Raises: ConfigError for a file that is not in data.train or has two weights.
    """
    if not weights:
        return None
    files = find_files(names, "data.train")
    found: dict[Path, tuple[str, float]] = {}
    for name, weight in weights.items():
        context = f"data.weights: {name}: {weight:g}"
        for path in _expand(name, "data.weights"):
            if path not in files:
                raise ConfigError(f"{context}: {path} is not in data.train; keys must be paths or globs of data.train")
            if path in found:
                raise ConfigError(
                    f"{context}: {path} already has a weight from {found[path][0]}; remove one of the two"
                )
            found[path] = name, weight
    return tuple(found[path][1] if path in found else 1.0 for path in files)


def format_files(files: Sequence[Path]) -> str:
    """Format files for a message: a single file, or the number of files and the first of them."""
    if len(files) == 1:
        return str(files[0])
    return f"{len(files)} files ({', '.join(map(str, files[:_NAMED_FILES]))}{', ...' if files[_NAMED_FILES:] else ''})"


def is_saved_dataset(path: Path) -> bool:
    """Return whether the directory is a single set (not several splits) saved by `datasets`."""
    return (path / STATE_FILE).is_file() and (path / "dataset_info.json").is_file()


def _expand(name: str | Path, key: str) -> list[Path]:
    path = Path(name)
    # The name of an existing file may contain * or [.
    if path.exists() or not glob.has_magic(str(name)):
        return _files_of(path, key)
    if not (matches := sorted(glob.glob(str(name), recursive=True))):
        raise DataError(f"{key}: there is no file {name}; set {key} to a {_KINDS} file, or to a glob that matches some")
    return [file for match in matches for file in _files_of(Path(match), key)]


def _files_of(path: Path, key: str) -> list[Path]:
    if not path.exists():
        several = " (write several files as a list: '[a.jsonl, b.jsonl]')" if "," in str(path) else ""
        raise DataError(f"{key}: there is no file {path}; set {key} to a {_KINDS} file{several}")
    if path.is_dir():
        return [path] if is_saved_dataset(path) else _shards(path, key)
    if not path.is_file():
        raise DataError(f"{key}: {path} is not a file; set {key} to a {_KINDS} file")
    if path.suffix not in KINDS:
        raise DataError(
            f"{key}: {path} is neither .jsonl nor .parquet nor .csv; convert it and set {key} to the result"
        )
    return [path]


def _shards(path: Path, key: str) -> list[Path]:
    """Return the files directly in a directory.

    A directory with several splits is rejected, because training on test rows would go unnoticed.
    """
    if (path / SPLITS_FILE).is_file():
        splits = sorted(part.name for part in path.iterdir() if is_saved_dataset(part))
        raise DataError(f"{key}: {path} contains the splits {', '.join(splits)}; name one, such as {path / splits[0]}")
    # Skip names that begin with . or _, like pyarrow and Spark: they are metadata.
    files = sorted(each for each in path.iterdir() if each.suffix in KINDS and each.name[0] not in "._")
    if not files:
        below = sorted({file.parent for kind in KINDS for file in path.glob(f"*/*{kind}")})
        hint = f"; such files are in {', '.join(map(str, below[:_NAMED_FILES]))}" if below else ""
        raise DataError(f"{key}: {path} contains no {_KINDS} file and no set saved by `datasets`{hint}")
    splits = sorted({match[1].lower() for file in files if (match := _SPLIT.match(file.name))})
    if len(splits) > 1:
        raise DataError(
            f"{key}: {path} contains files of several splits ({', '.join(splits)}); select one with a glob, such as "
            f"{path}/{splits[-1]}*"
        )
    return files
