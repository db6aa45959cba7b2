"""Non-weight files of an HF directory (configuration, tokenizer, code) that are copied along with the weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from model_converters.durable_files import sync, write_json
from model_converters.errors import ConversionError
from model_converters.inputs import open_regular, require_inside, special_kind
from model_converters.vision_model import nested_fields

HF_FOLDER = "config_and_tokenizer"
"""Folder of the side files in a Megatron checkpoint. Its name shows that it contains no weights."""
_OLDER_HF_FOLDER = "hf"

_CONFIG = "config.json"
_PATTERNS = (
    *(_CONFIG, "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.*"),
    # Processors of images, and of videos.
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    # Models whose tokenizer or configuration comes with its own code.
    *("*.model", "*.tiktoken", "*.py"),
)
_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")


def copy_side_files(source: Path | str, target: Path | str, config: Mapping[str, object] | None = None) -> None:
    """Copy configuration, generation and tokenizer files into `target`, which is created, and fsync them.

    `config` replaces the config.json of `source`, which may then be missing.

    Raises: ConversionError if there is no config.json, or for a file that side_files rejects; OSError.
    """
    source, target = Path(source), Path(target)
    files = side_files(source)
    if config is None and source / _CONFIG not in files:
        raise ConversionError(f"{source / _CONFIG} does not exist; a model directory needs its config.json")
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        with open_regular(file) as opened, (target / file.name).open("wb") as copy:
            shutil.copyfileobj(opened, copy)
        # The caller renames the directory when it is complete; its files must be on the disk by then.
        sync(target / file.name)
    if config is not None:
        write_json(target / _CONFIG, nested_fields(config))
    sync(target)


def side_files(source: Path) -> list[Path]:
    """List the non-weight files of a model directory that are copied with its weights.

    Raises: ConversionError naming a link that leaves the directory (its target would be published with the model), a
    dangling link, or a directory, named pipe, socket or device with the name of such a file.
    """
    found = sorted({file for pattern in _PATTERNS for file in source.glob(pattern)})
    # A folder may be named `tokenizer`, but not `tokenizer.json`.
    files = [file for file in found if file.suffix in _SUFFIXES or not file.is_dir()]
    for file in files:
        require_inside(file, source)
        kind = special_kind(file) or (None if file.exists() else "a dangling link")
        if kind is not None:
            raise ConversionError(f"{file} is {kind}; it must be a regular file")
    return files


def side_files_in(ckpt: Path) -> Path:
    """Return the folder of the side files in a checkpoint, which may not exist. Older checkpoints use another name."""
    older = ckpt / _OLDER_HF_FOLDER
    return older if older.is_dir() else ckpt / HF_FOLDER
