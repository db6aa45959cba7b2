"""The files of an HF directory that are no weights and go wherever the weights go."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_converters.errors import ConversionError
from model_converters.inputs.regular_files import open_regular, require_inside, special_kind

HF_FOLDER = "config_and_tokenizer"
"""Where a megatron checkpoint keeps them: named so that nobody takes it for a model with weights."""
_OLDER_HF_FOLDER = "hf"

_CONFIG = "config.json"
_PATTERNS = (
    _CONFIG,
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    # Models whose tokenizer or configuration is code of their own.
    "*.model",
    "*.tiktoken",
    "*.py",
)
_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")


def copy_side_files(source: Path | str, target: Path | str, config: Mapping[str, Any] | None = None) -> None:
    """Copies configuration, generation and tokenizer files into the directory `target`, durably; makes it. `config`
    stands for the config.json of `source`, which may then be gone.

    Raises: ConversionError when there is no config.json, and as side_files; OSError.
    """
    source, target = Path(source), Path(target)
    files = side_files(source)
    if config is None and source / _CONFIG not in files:
        raise ConversionError(f"{source / _CONFIG} does not exist; a model directory needs its config.json")
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        with open_regular(file) as opened, (target / file.name).open("wb") as copy:
            shutil.copyfileobj(opened, copy)
        sync(target / file.name)
    if config is not None:
        (target / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        sync(target / _CONFIG)
    sync(target)


def side_files(source: Path) -> list[Path]:
    """The files of a model directory that are copied with its weights.

    Raises: ConversionError naming a link that leaves the directory, whose target would be published with the model, a
    link to nothing, and a directory, named pipe, socket or device in the place of a file.
    """
    found = sorted({file for pattern in _PATTERNS for file in source.glob(pattern)})
    # A folder may be called tokenizer, but none is called tokenizer.json.
    files = [file for file in found if file.suffix in _SUFFIXES or not file.is_dir()]
    for file in files:
        require_inside(file, source)
        kind = special_kind(file) or (None if file.exists() else "a link to nothing")
        if kind is not None:
            raise ConversionError(f"{file} is {kind}; it must be a regular file")
    return files


def side_files_in(ckpt: Path) -> Path:
    """Where a checkpoint keeps them, if it has any; one that is older has them under another name."""
    older = ckpt / _OLDER_HF_FOLDER
    return older if older.is_dir() else ckpt / HF_FOLDER


def sync(path: Path) -> None:
    """Makes a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
