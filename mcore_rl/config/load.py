"""Reads YAML plus `key=value` overrides into a checked Config; writes the resolved one beside the run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.config.aliases import nearest
from mcore_rl.config.fields import leaves
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError


def load_config(path: str, overrides: Sequence[str] = (), *, needs_data: bool = True) -> Config:
    """Merges defaults, the YAML file and the overrides, in this order. Without needs_data, data.train may be unset.

    Raises: ConfigError for a file that cannot be read, an unknown key (naming the nearest known one), a value
    of the wrong type, and a key without which nothing can start.
    """
    _refuse_blanks(overrides)
    merged = OmegaConf.structured(Config)
    if not needs_data:
        merged.data.train = []
    for tree, source in [(_read_yaml(path), path), *((_parse_override(item), item) for item in overrides)]:
        _refuse_unknown(tree, source)
        try:
            merged = OmegaConf.merge(merged, with_lists(tree))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source}: {_first_line(error)}") from None
    try:
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "a key"
        raise ConfigError(f"{key} must be set, in {path} or on the command line as {key}=VALUE") from None


def known_keys() -> list[str]:
    """Every leaf key of the schema, dotted."""
    return sorted(leaf.key for leaf in leaves(Config()))


def with_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a YAML file, in which a path on its own, where a list of paths may stand, is a list of one."""
    changed = dict(tree)
    for leaf in leaves(Config()):
        section, _, name = leaf.key.rpartition(".")
        values = tree.get(section)
        if leaf.domain.path and leaf.is_list and isinstance(values, dict) and isinstance(values.get(name), str):
            changed[section] = {**changed[section], name: [values[name]]}
    return changed


def write_resolved(config: Config, path: Path) -> None:
    """Writes the whole configuration as YAML, atomically; only its owner may read it, as slurm.environment is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", opener=for_the_owner) as file:
        file.write(OmegaConf.to_yaml(OmegaConf.structured(config)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def for_the_owner(path: str, flags: int) -> int:
    """An opener of files that nobody else may read."""
    return os.open(path, flags, 0o600)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    try:
        tree = yaml.load(text, Loader=YamlLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections such as run:, model:, data:")
    return tree


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as a string, though people write learning rates that way, and 12:00:00 as the number 43200,
    though it is a time limit."""


_INT = "tag:yaml.org,2002:int"
YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"), list("-+0123456789")
)
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _refuse_blanks(overrides: Sequence[str]) -> None:
    """`trainer.steps = 3` are three words of a command line."""
    for place, word in enumerate(overrides):
        key, _, value = word.partition("=")
        before, after = overrides[max(0, place - 1) : place], list(overrides[place + 1 : place + 3])
        if key != key.strip() and key.strip() and "=" in word:
            joined = f"{key.strip()}={value.strip()}"
        elif "=" not in word and after and after[0].startswith("="):
            joined = "".join([word, *after[: 2 if after[0] == "=" else 1]])
        elif "=" not in word and before and before[0].endswith("="):
            joined = before[0] + word
        else:
            continue
        raise ConfigError(f"write {joined} without blanks around =")


def _parse_override(item: str) -> dict[str, Any]:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {item!r} must have the form key=value")
    try:
        value = yaml.load(text, Loader=YamlLoader) if text else None
    except (yaml.YAMLError, RecursionError):
        value = text
    if isinstance(value, dict | list) and not text.lstrip().startswith(("{", "[")):
        value = text  # 'Score: (\d+)' is a text: nobody writes YAML's block style on a command line
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree  # type: ignore[no-any-return]


def _refuse_unknown(tree: dict[str, Any], source: str) -> None:
    for key in _unknown(tree, Config, ""):
        near = nearest(key, [*known_keys(), *_sections(Config, "")])
        raise ConfigError(f"{source}: unknown key {key}; did you mean {near}?")


def _unknown(tree: dict[str, Any], node: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(node)
    for name, value in tree.items():
        if name not in hints:
            yield _first_leaf(f"{prefix}{name}", value)
        elif is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{prefix}{name} is a section; set the keys in it, such as {prefix}{name}.{_example(hints[name])}"
                )
            yield from _unknown(value, hints[name], f"{prefix}{name}.")


def _first_leaf(key: str, value: Any) -> str:
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _example(node: Any) -> str:
    return fields(node)[0].name


def _sections(node: Any, prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(node).items():
        if is_dataclass(hint):
            yield f"{prefix}{name}"
            yield from _sections(hint, f"{prefix}{name}.")


def _first_line(error: Exception) -> str:
    key = getattr(error, "full_key", None)
    message = str(error).splitlines()[0]
    return f"{key}: {message}" if key and key not in message else message
