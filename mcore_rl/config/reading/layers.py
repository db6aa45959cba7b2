"""Layers of a configuration: files and overrides, merged one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from mcore_rl.config.reading.expansion import expand_path
from mcore_rl.config.reading.overrides import parse_override
from mcore_rl.config.reading.values import YamlLoader
from mcore_rl.errors import ConfigError

VERL_SECTION = "actor_rollout_ref"
"""Section of every configuration of verl, which has no section `model`."""
NAMED_SETS = ("data.val.", "data.val_sets.")
"""Beginnings of keys of named validation sets."""
_LEADING_KEY = re.compile(r"[\w.]*")


@dataclass(frozen=True)
class Layer:
    """One source of keys: a file or an override.

    source: path of the file, or the override as written. tree: its keys as nested mappings. text: content of the file;
    None for an override.
    """

    source: str
    tree: dict[str, object]
    text: str | None = None

    def names(self) -> Iterator[str]:
        """Yield the full names of the keys with a value. A list at data.val replaces named sets, and vice versa."""
        for key in _keys(self.tree, ""):
            yield key
            if key == "data.val":
                yield "data.val_sets"
            elif key.startswith(NAMED_SETS):
                yield "data.val"

    def place(self, key: str) -> str:
        """Return the source and, for a file, the line of `key` or of its innermost section there."""
        line = None if self.text is None else _line_of(self.text, key)
        return self.source if line is None else f"{self.source}, line {line}"

    def located(self, error: ConfigError) -> ConfigError:
        """Return an error about a value, whose message begins with the key, with file and line before it. The message
        about an override is unchanged, because its key is enough to find it."""
        leading = _LEADING_KEY.match(str(error))
        if self.text is None or leading is None:
            return error
        return ConfigError(f"{self.place(leading[0])}: {error}")


def file_layer(path: str) -> Layer:
    """Read a configuration file.

    Raises: ConfigError if it cannot be read, is not valid YAML, holds no mapping, or is a configuration of verl.
    """
    path = expand_path("CONFIG", path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    return text_layer(path, text)


def text_layer(source: str, text: str) -> Layer:
    """Parse the text of a configuration file; `source` names it in messages. Raises: ConfigError."""
    try:
        tree = yaml.load(text, Loader=YamlLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: `!!int x`
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} must hold a mapping of sections such as run:, model:, data:")
    if VERL_SECTION in tree and "model" not in tree:
        raise ConfigError(
            f"{source} is a configuration of verl, with the section {VERL_SECTION}; translate it with "
            f"`mcore-rl import-verl {source} --out NEW.yaml`"
        )
    return Layer(source, tree, text)


def override_layer(item: str) -> Layer:
    """Parse an override. Raises: ConfigError."""
    return Layer(item, parse_override(item))


def _keys(tree: dict[str, object], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _line_of(text: str, key: str) -> int | None:
    """Return the line of `key` in YAML text, counted from 1, or of its innermost section; None if the text has
    neither."""
    node: yaml.Node | None = yaml.compose(text, Loader=YamlLoader)
    line: int | None = None
    for part in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        # Of a key that is written twice, YAML keeps the last value.
        found = next(((name, value) for name, value in reversed(pairs) if name.value == part), None)
        if found is None:
            break
        name, node = found
        line = name.start_mark.line + 1
    return line
