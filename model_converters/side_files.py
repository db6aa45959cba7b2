"""The files of an HF directory that are no weights and go wherever the weights go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from model_converters.errors import ConversionError

HF_FOLDER = "hf"
"""Where a megatron checkpoint keeps them."""

_PATTERNS = (
    "config.json",
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


def copy_side_files(source: Path | str, target: Path | str) -> None:
    """Copies configuration, generation and tokenizer files into the directory `target`, durably; makes it.

    Raises: ConversionError when `source` has no config.json; OSError.
    """
    source, target = Path(source), Path(target)
    if not (source / "config.json").is_file():
        raise ConversionError(f"{source / 'config.json'} does not exist; a model directory needs its config.json")
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted({file for pattern in _PATTERNS for file in source.glob(pattern) if file.is_file()}):
        shutil.copyfile(file, target / file.name)
        sync(target / file.name)
    sync(target)


def sync(path: Path) -> None:
    """Makes a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
