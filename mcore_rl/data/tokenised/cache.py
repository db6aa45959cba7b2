"""Cache of tokenised files in data.cache_dir: one Arrow file per set, `<digest>-<CRC-32>.arrow`.

The digest covers everything that the content depends on, so a stale file is never found. The CRC-32 of the file detects
damage. Token ids are memory-mapped; other values are JSON, one line per row.

`datasets` does not replace this: its fingerprints depend on paths and modification times instead of contents, its files
have no checksums, its columns have one type where rows may mix several, and it reports the error of whichever process
fails first.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.data.checksum import file_crc32
from mcore_rl.data.prompts import COLUMNS, LoadReport, PromptSet, SupervisedSet
from mcore_rl.data.sources.paths import is_saved_dataset
from mcore_rl.data.tokenised.blocks import BlockTokeniser
from mcore_rl.errors import ConfigError
from model_converters.durable_files import sync

if TYPE_CHECKING:
    import pyarrow

FORMAT = 5
"""Version of the cached files. Increase it when the same rows would be read, rendered or written differently."""
# Keys that change the tokenised rows. data.shuffle and data.weights, for example, do not.
_DATA_KEYS = (
    *("prompt_key", "answer_key", "image_key", "template", "plain_template", "system_prompt", "template_kwargs"),
    *("long_prompts", "hint_key", "hint_template", "max_hinted_tokens"),
)
_ROLLOUT_KEYS = ("keep_sampling_mask", "max_prompt_tokens", "max_response_tokens")
_PACKAGES = ("mcore-rl", "transformers", "tokenizers", "jinja2")
_PATH_SETTINGS = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file")

Stamp = tuple[tuple[str, int, int], ...]


def digest(files: Sequence[Path], tokeniser: BlockTokeniser, max_prompts: int | None) -> str:
    """Return 32 hexadecimal digits, which depend on the contents of the files and not on their paths.

    Raises: OSError.
    """
    facts = {
        "format": FORMAT,
        "packages": [metadata.version(package) for package in _PACKAGES],
        "files": [(path.suffix, [_content(part) for part in _parts(path)]) for path in files],
        "tokenizer": _tokenizer_facts(tokeniser),
        "data": {name: getattr(tokeniser.data_config, name) for name in _DATA_KEYS},
        "rollout": {name: getattr(tokeniser.rollout_config, name) for name in _ROLLOUT_KEYS},
        "runs_tools": tokeniser.runs_tools,
        "tools": [dict(tool) for tool in tokeniser.tools],
        "targets": tokeniser.with_targets,
        "max_prompts": max_prompts,
        "samples_train": tokeniser.samples_train,
        "image_text": None if tokeniser.images is None else tokeniser.images.text,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def stamp(files: Sequence[Path]) -> Stamp:
    """Return path, size and modification time of every file: a value that changes when a file is written.

    Raises: OSError.
    """
    stats = [(part, part.stat()) for path in files for part in _parts(path)]
    return tuple((str(part), found.st_size, found.st_mtime_ns) for part, found in stats)


def _parts(path: Path) -> Iterator[Path]:
    yield from sorted(each for each in path.iterdir() if each.is_file()) if is_saved_dataset(path) else [path]


def _content(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _tokenizer_facts(tokeniser: BlockTokeniser) -> list[str]:
    """Return everything that decides the token ids. The tokenizer's files may have moved, so paths are left out."""
    tokenizer = tokeniser.tokenizer
    template = json.dumps(tokenizer.chat_template)
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name not in _PATH_SETTINGS}
    return [
        hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest(),
        type(tokenizer).__name__,
        json.dumps(settings, sort_keys=True, default=str),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        template,
        time.strftime("%Y-%m-%d") if "strftime" in template else "",  # the template may print the date
    ]


_REPORT = b"mcore_rl.report"
_TOKENS, _TARGETS, _TEXTS, _ROWS, _HINTS = "tokens", "targets", "texts", "rows", "hints"
_ROW_COLUMNS = tuple(name for name in COLUMNS if name not in ("text", "images"))
"""Columns that are stored as one JSON object per row."""


@dataclass
class TokenCache:
    """The cache entry of some files. `notes` are remarks for the user."""

    directory: Path
    files: Sequence[Path]
    name: str
    stamp: Stamp
    notes: list[str]

    def load(self) -> tuple[SupervisedSet, LoadReport] | None:
        """Return the entry, or None if there is none. A damaged one is removed and noted."""
        for path in sorted(self.directory.glob(f"{self.name}-*.arrow")):
            if f"{file_crc32(path).value:08x}" == path.stem.rpartition("-")[2]:
                self.notes.append("read from data.cache_dir")
                return _read(path)
            path.unlink(missing_ok=True)
            self.notes.append(f"{path} was damaged and is built again")
        return None

    def save(self, rows: SupervisedSet, report: LoadReport) -> None:
        """Write the entry, unless JSON cannot hold a value or a file has changed since it was read; notes the reason.

        Raises: ConfigError if the directory is not writable.
        """
        lines = _json_lines(rows.prompts)
        if isinstance(lines, str):
            self.notes.append(f"not kept in data.cache_dir: {lines}")
            return
        if stamp(self.files) != self.stamp:
            self.notes.append("not kept in data.cache_dir: a file changed while it was read")
            return
        # Several runs may build the same entry at once; the last rename wins, with equal contents.
        temporary = self.directory / f".{self.name}.{os.getpid()}.partial"
        try:
            _write(temporary, rows, lines, report)
            # Before the rename: after a crash, the final name must not refer to an incomplete file.
            sync(temporary)
            os.replace(temporary, self.directory / f"{self.name}-{file_crc32(temporary).value:08x}.arrow")
            sync(self.directory)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _cannot_write(self.directory, error) from error


def open_cache(files: Sequence[Path], tokeniser: BlockTokeniser, max_prompts: int | None = None) -> TokenCache | None:
    """Return the cache entry in data.cache_dir; None if the key is not set.

    Raises: ConfigError if the directory or the tokenizer does not support a cache.
    """
    if tokeniser.data_config.cache_dir is None:
        return None
    if not tokeniser.tokenizer.is_fast:
        raise ConfigError(
            f"data.cache_dir: {type(tokeniser.tokenizer).__name__} has no tokenizer.json to recognise it by; set "
            "data.cache_dir=null"
        )
    directory = Path(tokeniser.data_config.cache_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Before the digest, so that `save` notices a file that changes while it is hashed or read.
        before = stamp(files)
        return TokenCache(directory, files, digest(files, tokeniser, max_prompts), before, [])
    except OSError as error:
        raise _cannot_write(directory, error) from error


def _json_lines(prompts: PromptSet) -> list[str] | str:
    """Return a line per row; if a value would change in JSON, return the reason instead."""
    if any(prompts.columns["images"]):
        return "images are not part of it"  # and an image may change without its path
    lines = []
    for number in range(len(prompts)):
        row = {name: prompts.columns[name][number] for name in _ROW_COLUMNS}
        for name, value in row.items():
            try:
                # JSON changes some values silently, such as tuples and keys that are numbers.
                same = json.loads(json.dumps(value)) == value
            except (TypeError, ValueError):
                same = False
            if not same:
                return f"JSON cannot hold {name} of prompt {number + 1}"
        lines.append(json.dumps(row, ensure_ascii=False))
    return lines


def _write(path: Path, rows: SupervisedSet, lines: list[str], report: LoadReport) -> None:
    import pyarrow

    prompts = rows.prompts
    columns = {
        _TOKENS: _ragged_column(prompts.tokens, prompts.offsets),
        _TARGETS: _ragged_column(rows.target_tokens, rows.target_offsets),
        _TEXTS: pyarrow.array(prompts.columns["text"], pyarrow.large_string()),
        _ROWS: pyarrow.array(lines, pyarrow.large_string()),
    }
    if prompts.hint_tokens is not None and prompts.hint_offsets is not None:
        columns[_HINTS] = _ragged_column(prompts.hint_tokens, prompts.hint_offsets)
    types = [(name, column.type) for name, column in columns.items()]
    schema = pyarrow.schema(types, metadata={_REPORT: json.dumps(asdict(report)).encode()})
    # One batch, so that every column is one memory-mapped array.
    batch = pyarrow.RecordBatch.from_arrays(list(columns.values()), schema=schema)
    with path.open("wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)


def _ragged_column(values: np.ndarray, offsets: np.ndarray) -> pyarrow.Array:
    import pyarrow

    return pyarrow.LargeListArray.from_arrays(
        pyarrow.array(offsets, pyarrow.int64()), pyarrow.array(values, pyarrow.int32())
    )


def _read(path: Path) -> tuple[SupervisedSet, LoadReport]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_file(source) as file:
        batch, report = file.get_batch(0), json.loads(file.schema.metadata[_REPORT])
    tokens, targets = batch.column(_TOKENS), batch.column(_TARGETS)
    rows = [json.loads(line) for line in batch.column(_ROWS).to_pylist()]
    texts = batch.column(_TEXTS).to_pylist()
    columns = {name: [row[name] for row in rows] for name in _ROW_COLUMNS}
    columns = {name: columns.get(name, texts) for name in COLUMNS} | {"images": [()] * len(rows)}
    hints = [batch.column(_HINTS)] if _HINTS in batch.schema.names else []
    hint_arrays = [array.to_numpy() for column in hints for array in (column.values, column.offsets)]
    prompts = PromptSet(tokens.values.to_numpy(), tokens.offsets.to_numpy(), columns, *hint_arrays)
    report |= {name: tuple(report[name]) for name in ("notes", "of_files")}
    return SupervisedSet(prompts, targets.values.to_numpy(), targets.offsets.to_numpy()), LoadReport(**report)


def _cannot_write(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"data.cache_dir={directory}: {error.strerror} ({error.filename or directory}); set it to a directory that can "
        "be written to, or to null"
    )
