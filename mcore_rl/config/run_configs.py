"""Configurations in a run directory: config.yaml of the last start, config.<n>.yaml of earlier starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from mcore_rl.config.fields import written
from mcore_rl.config.load import as_yaml
from mcore_rl.config.reading.unknown_keys import known_keys
from mcore_rl.config.reading.values import YamlLoader, normalized
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from model_converters.durable_files import durable_write

CONFIG_FILE = "config.yaml"
NOT_OF_THE_RUN = ("run.dir", "cluster.address", "observe.", "slurm.", "plan.")
"""Keys and sections that describe where a run is started, not what it computes."""
_UNKNOWN = object()


def replace_config(config: Config, directory: Path) -> list[str]:
    """Write config.yaml; a different existing one is kept as config.<n>.yaml. Returns the changed keys of the run as
    `key: old -> new`."""
    path = directory / CONFIG_FILE
    new = as_yaml(config)
    before = path.read_text(encoding="utf-8") if path.exists() else new
    if before != new:
        _keep(path, before)
    # After the old file is kept, so that a start that ends here loses nothing.
    _write(path, new)
    return [f"{key}: {old} -> {now}" for key, old, now in _changed(before, new) if not key.startswith(NOT_OF_THE_RUN)]


def recorded_texts(run_dir: str, key: str) -> Iterator[str]:
    """Yield the texts at a key of the last start's configuration: the value, or the items of a list or mapping."""
    path = Path(run_dir) / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a new run, or a directory that a later check rejects
        return
    yield from _texts(_at(_tree(text), key))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        # The keys of data.weights are paths; its values are numbers.
        for item in (*value, *(value.values() if isinstance(value, dict) else ())):
            yield from _texts(item)


def _keep(path: Path, text: str) -> None:
    numbered = ((other.name.split(".")[1], other) for other in path.parent.glob("config.*.yaml"))
    taken = {int(number): other for number, other in numbered if number.isdigit()}
    last = max(taken, default=0)
    if last and taken[last].read_text(encoding="utf-8") == text:
        return  # already kept by a start that ended before it wrote its own configuration
    _write(path.with_name(f"config.{last + 1}.yaml"), text)


def _write(path: Path, text: str) -> None:
    """Write a file atomically. Only its owner can read it, because slurm.environment may hold secrets."""
    with durable_write(path, mode=0o600) as file:
        file.write(text.encode())


def _changed(before: str, new: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, old value and new value where two resolved configurations differ. A key that the older file lacks
    counts as its default."""
    defaults: object = OmegaConf.to_container(OmegaConf.structured(Config))
    old, now = _tree(before), _tree(new)
    for key in known_keys():
        value, was = _at(now, key), _at(old, key)
        # A key that did not exist when the file was written had its default value.
        was = _at(defaults, key) if was is _UNKNOWN else was
        if was != value:
            yield key, written(was), written(value)


def _tree(text: str) -> object:
    try:
        tree = yaml.load(text, Loader=YamlLoader)
    except yaml.YAMLError:
        return {}
    try:
        return normalized(tree, expand=False) if isinstance(tree, dict) else tree  # older files: a path without a list
    except ConfigError:  # a value that only an older version accepts is compared as written
        return tree


def _at(tree: object, key: str) -> object:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return _UNKNOWN
        tree = tree[part]
    return tree
