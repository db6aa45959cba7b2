"""Loading of the configuration from YAML files and `key=value` overrides, and the resolved configuration as YAML."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from omegaconf.errors import MissingMandatoryValue as MissingValueError

from mcore_rl.config.reading.layers import Layer, file_layer, override_layer, text_layer
from mcore_rl.config.reading.overrides import reject_blanks
from mcore_rl.config.reading.run_directory import filled, is_template
from mcore_rl.config.reading.unknown_keys import reject_unknown
from mcore_rl.config.reading.values import YamlDumper, normalized
from mcore_rl.config.rules.estimators import expand_preset
from mcore_rl.config.rules.objective import select_loss
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

_UNSET_VARIABLE = re.compile(r"Environment variable '(\w+)' not found")
Source = str | os.PathLike[str]
"""Path of a configuration file."""


def load_config(files: Source | Sequence[Source], overrides: Sequence[str] = (), *, needs_data: bool = True) -> Config:
    """Merge defaults, the YAML files and the overrides, in this order; a later one wins. Sections and mappings are
    merged key by key, lists are replaced. Placeholders in run.dir are replaced. Without needs_data, data.train may be
    unset.

    Raises: ConfigError for a file that cannot be read, an unknown key (naming a similar one, if any), a value of the
    wrong type, or a missing required key. It names the file and the line, or the override.
    """
    reject_blanks(overrides)
    paths = [os.fspath(path) for path in ([files] if isinstance(files, str | os.PathLike) else files)]
    return _combined([*map(file_layer, paths), *map(override_layer, overrides)], paths, needs_data=needs_data)


def load_text(text: str, *, needs_data: bool = True) -> Config:
    """Load the text of a configuration that is in no file yet. Errors name `the configuration` instead of a file."""
    name = "the configuration"
    return _combined([text_layer(name, text)], [name], needs_data=needs_data)


def _combined(layers: Sequence[Layer], paths: Sequence[str], *, needs_data: bool) -> Config:
    """Merge the layers into the defaults, in order. `paths`: files for messages and for the name of the run."""
    merged: DictConfig = pickle.loads(_defaults())
    if not needs_data:
        # OmegaConf rejects a mandatory value that is missing, and a plan reads no data.
        merged.data.train = []
    # One by one, so that an error names the file or override that caused it.
    for place, layer in enumerate(layers):
        _merge(merged, layer, replaced={key for later in layers[place + 1 :] for key in later.names()})
    try:
        if is_template(merged.run.dir):
            merged.run.dir = filled(merged.run.dir, paths, datetime.now().astimezone())
        config: Config = OmegaConf.to_object(merged)  # type: ignore[assignment]
        return select_loss(expand_preset(config, {name for layer in layers for name in layer.names()}))
    except OmegaConfBaseException as error:
        raise _unresolved(error, paths) from None


def _merge(merged: DictConfig, layer: Layer, *, replaced: set[str]) -> None:
    """Merge a layer into the configuration. `replaced`: keys of later layers. Raises: ConfigError."""
    reject_unknown(layer.tree, layer.place)
    try:
        merged.merge_with(normalized(layer.tree, replaced=replaced))
    except ConfigError as error:
        raise layer.located(error) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{layer.place(_key_of(error))}: {_first_line(error)}") from None
    except TypeError as error:  # raised by OmegaConf for a mapping instead of a list, and vice versa
        raise ConfigError(f"{layer.source}: a value has the wrong form: {error}") from None


@cache
def _defaults() -> bytes:
    """Pickled defaults with the types of the schema. Unpickling takes 5 ms, OmegaConf's deepcopy takes 40 ms."""
    return pickle.dumps(OmegaConf.structured(Config))


def as_yaml(config: Config) -> str:
    """Format the whole configuration as YAML; load_config reads back an equal one."""
    # Plain values, without the types of OmegaConf, which the dumper does not know.
    tree = OmegaConf.to_container(OmegaConf.structured(config))
    # The order of the schema, since related keys are next to each other there.
    return yaml.dump(tree, Dumper=YamlDumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def _key_of(error: OmegaConfBaseException) -> str:
    return str(getattr(error, "full_key", None) or "")


def _first_line(error: Exception) -> str:
    key = getattr(error, "full_key", None)
    # Further lines of OmegaConf's messages are about its own types.
    message = str(error).splitlines()[0]
    return f"{key}: {message}" if key and key not in message else message


def _unresolved(error: OmegaConfBaseException, paths: Sequence[str]) -> ConfigError:
    key = _key_of(error) or "a key"
    if isinstance(error, MissingValueError):
        return ConfigError(f"{key} must be set, in {', '.join(paths)} or on the command line as {key}=VALUE")
    if isinstance(error, InterpolationResolutionError):
        # Raised by ${oc.env:NAME}; OmegaConf's message is the only sign of it.
        if (unset := _UNSET_VARIABLE.search(str(error))) is not None:
            return ConfigError(
                f"{key}: the environment variable {unset[1]} of ${{oc.env:{unset[1]}}} is not set; set it, or write "
                f"${{oc.env:{unset[1]},DEFAULT}}"
            )
        return ConfigError(
            f"{key}: ${{...}} refers to another key, such as ${{run.dir}}, and this one does not exist "
            f"({str(error).splitlines()[0]}); write \\${{ for the text"
        )
    return ConfigError(f"{key}: {_first_line(error)}")
