"""Loading of the configuration from YAML and `key=value` overrides, and the resolved configuration as YAML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from omegaconf.errors import MissingMandatoryValue as MissingValueError

from mcore_rl.config.reading.expansion import expand_path
from mcore_rl.config.reading.unknown_keys import reject_unknown
from mcore_rl.config.reading.values import YamlDumper, YamlLoader, normalized, takes_only_text
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

VERL_SECTION = "actor_rollout_ref"
"""Section of every configuration of verl, which has no section `model`."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, needs_data: bool = True) -> Config:
    """Merge defaults, the YAML file and the overrides, in this order. Without needs_data, data.train may be unset.

    Raises: ConfigError for a file that cannot be read, an unknown key (naming a similar one, if any), a value of the
    wrong type, or a missing required key.
    """
    _reject_blanks(overrides)
    path = expand_path("CONFIG", os.fspath(path))
    merged = deepcopy(_defaults())
    if not needs_data:
        # OmegaConf rejects a mandatory value that is missing, and a plan reads no data.
        merged.data.train = []
    # The sources are merged one by one, so that an error names the file or override that caused it.
    for tree, source in [(_read_yaml(path), path), *((_parse_override(item), item) for item in overrides)]:
        reject_unknown(tree, source)
        try:
            merged.merge_with(normalized(tree))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source}: {_first_line(error)}") from None
        except TypeError as error:  # raised by OmegaConf for a mapping instead of a list, and vice versa
            raise ConfigError(f"{source}: a value has the wrong form: {error}") from None
    try:
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise _unresolved(error, path) from None


@cache
def _defaults() -> DictConfig:
    """Defaults with the types of the schema. A copy takes a fifth of the time of a new one."""
    return OmegaConf.structured(Config)


def as_yaml(config: Config) -> str:
    """Format the whole configuration as YAML; load_config reads back an equal one."""
    # Plain values, without the types of OmegaConf, which the dumper does not know.
    tree = OmegaConf.to_container(OmegaConf.structured(config))
    # The order of the schema, since related keys are next to each other there.
    return yaml.dump(tree, Dumper=YamlDumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def _read_yaml(path: str) -> dict[str, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    try:
        tree = yaml.load(text, Loader=YamlLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: `!!int x`
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections such as run:, model:, data:")
    if VERL_SECTION in tree and "model" not in tree:
        raise ConfigError(
            f"{path} is a configuration of verl, with the section {VERL_SECTION}; translate it with "
            f"`mcore-rl import-verl {path} --out NEW.yaml`"
        )
    return tree


def _reject_blanks(overrides: Sequence[str]) -> None:
    """Reject blanks around `=`: the shell passes `trainer.steps = 3` as three arguments."""
    for place, word in enumerate(overrides):
        key, _, value = word.partition("=")
        before, after = overrides[max(0, place - 1) : place], list(overrides[place + 1 : place + 3])
        # The cases: 'key =value' in one argument; 'key' '=' 'value' or 'key' '=value'; 'key=' 'value'.
        if key != key.strip() and key.strip() and "=" in word:
            joined = f"{key.strip()}={value.strip()}"
        elif "=" not in word and after and after[0].startswith("="):
            joined = "".join([word, *after[: 2 if after[0] == "=" else 1]])
        elif "=" not in word and before and before[0].endswith("="):
            joined = before[0] + word
        else:
            continue
        raise ConfigError(f"write {joined} without blanks around =")


def _parse_override(item: str) -> dict[str, object]:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {item!r} must have the form key=value")
    try:
        value: object = yaml.load(text, Loader=YamlLoader) if text else None
    except (yaml.YAMLError, RecursionError, ValueError):
        value = text
    if isinstance(value, bool | int | float) and takes_only_text(key):
        value = text  # keep `no`, `1.10` and `007` as written
    if isinstance(value, dict | list) and not text.lstrip().startswith(("{", "[")):
        value = text  # 'Score: (\d+)' is a string: on a command line, YAML's block style is not intended
    first, *parts = key.split(".")
    for part in reversed(parts):
        value = {part: value}
    return {first: value}


def _first_line(error: Exception) -> str:
    key = getattr(error, "full_key", None)
    # Further lines of OmegaConf's messages are about its own types.
    message = str(error).splitlines()[0]
    return f"{key}: {message}" if key and key not in message else message


def _unresolved(error: OmegaConfBaseException, path: str) -> ConfigError:
    key = getattr(error, "full_key", None) or "a key"
    if isinstance(error, MissingValueError):
        return ConfigError(f"{key} must be set, in {path} or on the command line as {key}=VALUE")
    if isinstance(error, InterpolationResolutionError):
        return ConfigError(
            f"{key}: ${{...}} refers to another key, such as ${{run.dir}}, and this one does not exist "
            f"({str(error).splitlines()[0]}); write \\${{ for the text"
        )
    return ConfigError(f"{key}: {_first_line(error)}")
