"""Reading of scripts and YAML files of other trainers."""

from __future__ import annotations

from pathlib import Path

import yaml

from mcore_rl.config.reading.values import YamlLoader
from mcore_rl.errors import ConfigError
from mcore_rl.migration.shell.words import UNKNOWN

MAX_BYTES = 4 * 2**20
YAML_NAMES = (".yaml", ".yml")


def read_text(path: Path, expected: str = "") -> str:
    """Read a script or YAML file. `expected`: description of a file of the right kind, for messages.

    Raises: ConfigError if it cannot be read, is not text, or is larger than a script can be.
    """
    try:
        # A device such as /dev/zero has no end.
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {path}: {reason}") from None
    ending = f"; expected {expected}" if expected else ""
    if b"\0" in data:
        raise ConfigError(f"{path} is not a text file{ending}")
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES // 2**20} MiB{ending}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8{ending}") from None
    return text.replace("\r\n", "\n")


def is_yaml(path: Path) -> bool:
    """Return True if the file has the name of a YAML file."""
    return path.suffix.lower() in YAML_NAMES


def read_yaml(path: Path, expected: str = "") -> dict[str, object]:
    """Read a YAML file with a mapping. `expected`: description of a file of the right kind, for messages.

    Raises: ConfigError for anything else.
    """
    ending = f"; expected {expected}" if expected else ""
    try:
        tree = yaml.load(read_text(path, expected), Loader=YamlLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}{ending}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping of sections{ending}")
    return tree


def directory_name(text: str) -> str:
    """Return a directory's name for a run. Parts that only the shell knows, such as the time, are left out."""
    known = UNKNOWN.sub("", text)
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in known).strip("_.-")
