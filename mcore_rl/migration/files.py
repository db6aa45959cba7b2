"""Reading of scripts and YAML files of other trainers."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from mcore_rl.config.reading.values import YamlLoader
from mcore_rl.errors import ConfigError

MAX_BYTES = 4 * 2**20
YAML_NAMES = (".yaml", ".yml")


def read_text(path: Path) -> str:
    """Read a script or YAML file.

    Raises: ConfigError if it cannot be read, is not text, or is larger than a script can be.
    """
    try:
        if path.is_file() and os.path.getsize(path) > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES // 2**20} MiB, which is no launch script")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if "\0" in text:
        raise ConfigError(f"{path} is not a text file")
    return text


def is_yaml(path: Path) -> bool:
    """Return True if the file has the name of a YAML file."""
    return path.suffix.lower() in YAML_NAMES


def read_yaml(path: Path) -> dict[str, object]:
    """Read a YAML file with a mapping.

    Raises: ConfigError for anything else.
    """
    try:
        tree = yaml.load(read_text(path), Loader=YamlLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping of sections")
    return tree
