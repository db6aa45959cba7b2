"""YAML dialect of configuration files and overrides, and normalization of their raw values for the schema: nulls, lists
of paths, expanded paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

import yaml

from mcore_rl.config.fields import DOMAIN, Domain, field_types
from mcore_rl.config.functions import names_function
from mcore_rl.config.reading.expansion import check_utf8, expand_path, expand_spec
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_INT = "tag:yaml.org,2002:int"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_NONE_WORD = "tag:mcore-rl,2026:none"
MAX_BITS = 1000
"""Bits of an integer; floats have up to 1024."""


class NoneWord(str):
    """Unquoted `None`, `none` or `NONE`: null for a key that allows null."""

    __slots__ = ()


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 loader with changes: 1e-4 is a number (in YAML 1.1 a string), and a time limit such as 12:00:00 is a
    string (in YAML 1.1 the number 43200). None is a NoneWord. Dates such as 2026-11-25 are strings: directories are
    named by dates, and no key is a date. A value that contains itself, by an alias, is rejected."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        # Values are complete before those around them, which makes PyYAML report an alias to an incomplete value.
        self.deep_construct = True


YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"), list("-+0123456789")
)
YamlLoader.add_implicit_resolver(
    # YAML 1.1 requires a point, and a sign in the exponent.
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
YamlLoader.add_implicit_resolver(_NONE_WORD, re.compile(r"^(?:None|none|NONE)$"), list("Nn"))


def _integer(loader: YamlLoader, node: yaml.ScalarNode) -> int:
    """Reject an integer beyond the range of floats, which no key can have."""
    value = int(loader.construct_yaml_int(node))
    if value.bit_length() > MAX_BITS:
        raise yaml.constructor.ConstructorError(None, None, "an integer is too large", node.start_mark)
    return value


YamlLoader.add_constructor(_INT, _integer)
YamlLoader.add_constructor(_NONE_WORD, lambda loader, node: NoneWord(node.value))


class YamlDumper(yaml.SafeDumper):
    """Dumper that quotes every string that YamlLoader would read as another type."""


YamlDumper.yaml_implicit_resolvers = YamlLoader.yaml_implicit_resolvers

_IMAGE_FILE = re.compile(r"[~$/.]")
"""Beginning of a container image that is a file; other images are names in a registry."""

_TEMPLATE_FILE = re.compile(r"(?!.*\{(?:prompt|response|ground_truth)\}).*\.txt")
"""A judge.template that names a file."""


def normalized(tree: Mapping[str, object], *, expand: bool = True, replaced: Container[str] = ()) -> dict[str, object]:
    """Normalize the values of a file or override for the schema; `expand` replaces `~` and variables, except in the
    keys `replaced`, whose values a later file or override replaces.

    An empty text and the words None, none and NONE become null for keys that allow null. A single path becomes a list
    of one where a list of paths is allowed. A mapping at data.val moves to data.val_sets.

    Raises: ConfigError naming the key.
    """
    return _section(tree, Config, "", lambda key: expand and key not in replaced)


def takes_only_text(key: str) -> bool:
    """Return True if `key` is a text, or a list of texts, and allows no number or boolean."""
    hint: object = Config
    for part in key.split("."):
        if isinstance(hint, type) and is_dataclass(hint):
            hint = field_types(hint).get(part, Any)
        else:
            # A key within a mapping, such as slurm.environment.NAME, has the type of its values.
            hint = next((get_args(each)[1] for each in (hint, *get_args(hint)) if get_origin(each) is dict), Any)
    return _is_text(hint)


def _section(
    tree: Mapping[str, object], node: type[DataclassInstance], prefix: str, expands: Callable[[str], bool]
) -> dict[str, object]:
    hints = field_types(node)
    domains = {each.name: each.metadata.get(DOMAIN, Domain()) for each in fields(node)}
    if prefix == "data.":
        tree = _with_named_sets(tree)
    made: dict[str, object] = {}
    for name, value in tree.items():
        # Unknown keys have been rejected, except in config.yaml of older versions (run_configs.py).
        key, hint = f"{prefix}{name}", hints.get(name, Any)
        if isinstance(hint, type) and is_dataclass(hint):
            made[name] = _section(value, hint, f"{key}.", expands) if isinstance(value, dict) else value
        else:
            made[name] = _Key(key, domains.get(name, Domain()), expands(key)).fitted(value, hint)
    return made


def _is_text(hint: object) -> bool:
    """Return True if the type of a field allows texts or lists of texts, and neither mappings nor other scalars."""
    members = [hint, *get_args(hint)]
    types = members + [item for each in members if get_origin(each) is list for item in get_args(each)]
    mappings = any(get_origin(each) is dict for each in types)
    return str in types and not mappings and not {bool, int, float, Any}.intersection(types)


def _with_named_sets(tree: Mapping[str, object]) -> Mapping[str, object]:
    if "val" not in tree or "val_sets" in tree:
        return tree
    # Setting one form resets the other, so that a later file or override replaces an earlier one.
    named = isinstance(tree["val"], dict)
    return {**tree, "val": None if named else tree["val"], "val_sets": tree["val"] if named else None}


class _Key:
    """Conversion of the value of a key, or of an element within it, to the type of its field."""

    def __init__(self, key: str, domain: Domain, expand: bool) -> None:
        self.key, self.domain, self.expand = key, domain, expand

    def fitted(self, value: object, hint: object) -> object:
        types: list[object] = [hint, *get_args(hint)]
        if isinstance(value, NoneWord):
            return self._none_word(value, types)
        # `key=` on a command line resets a key that may be null. A path is never empty.
        if value == "" and (type(None) in types or self.domain.path):
            if type(None) not in types:
                raise ConfigError(f"{self.key} is empty; set it to a path")
            return None
        listed = next((each for each in types if get_origin(each) is list), None)
        if isinstance(value, str):
            check_utf8(self.key, value)
            text = self._expanded(value) if self.expand else value
            may_be_one = self.domain.path or self.domain.one_or_more
            return [text] if listed is not None and may_be_one else text
        # Not for lists of texts: YAML reads 007 as 7.
        if listed == list[int] and self.domain.one_or_more and isinstance(value, int) and not isinstance(value, bool):
            return [value]
        mapped = next((each for each in types if get_origin(each) is dict), None)
        if listed != mapped:
            self._check_container(value, takes_list=listed is not None, takes_mapping=mapped is not None)
        if isinstance(value, list):
            item = get_args(listed)[0] if listed is not None else Any
            return [self._inside(f"{self.key}[{place}]", each, item) for place, each in enumerate(value)]
        # OmegaConf would store another text than the written one: 1.10 as 1.1, and no as False.
        if isinstance(value, bool | float) and not self.domain.choices and _is_text(hint):
            raise ConfigError(f"{self.key}: YAML reads the value as {value}; put quotes around the text")
        if isinstance(value, dict):
            return self._mapping(value, mapped or dict[str, Any])
        return value

    def _check_container(self, value: object, *, takes_list: bool, takes_mapping: bool) -> None:
        """Raise ConfigError for a mapping instead of a list, or the reverse: OmegaConf's message lacks the key."""
        if isinstance(value, dict) and not takes_mapping:
            raise ConfigError(f"{self.key} is a mapping, not a list")
        if isinstance(value, list) and not takes_list:
            raise ConfigError(f"{self.key} is a list, not a mapping")

    def _inside(self, key: str, value: object, hint: object) -> object:
        if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
            return _section(value, hint, f"{key}.", lambda _: self.expand)
        if hint in (str, int, float) and isinstance(value, list | dict):
            # OmegaConf would accept a list in a list of numbers.
            wanted = "a text" if hint is str else "a number"
            raise ConfigError(f"{key} is a {'list' if isinstance(value, list) else 'mapping'}, not {wanted}")
        return _Key(key, self.domain, self.expand).fitted(value, hint)

    def _mapping(self, value: dict[object, object], hint: object) -> dict[object, object]:
        """Convert a mapping; a mapping to numbers has paths as keys, other mappings have paths as values."""
        item, paths_are_keys = get_args(hint)[1], self.domain.path and get_args(hint)[1] is float
        made: dict[object, object] = {}
        for name, each in value.items():
            new = str(name) if isinstance(name, NoneWord) else name
            if paths_are_keys and self.expand and isinstance(new, str):
                new = expand_path(self.key, new)
            made[new] = self._inside(f"{self.key}.{name}", each, item)
        return made

    def _none_word(self, word: NoneWord, types: list[object]) -> str | None:
        if type(None) in types or Any in types:
            return None
        # `none` is a choice of some keys, such as actor.fp8. For other texts it is ambiguous.
        if (str in types and not self.domain.choices) or any(get_origin(each) is list for each in types):
            raise ConfigError(f"""{self.key}={word}: the key cannot be null; write '"{word}"' if the text is meant""")
        return str(word)

    def _expanded(self, text: str) -> str:
        if self.domain.function and names_function(text):
            return expand_spec(self.key, text)
        # The other keys are paths only if they look like one.
        if self.domain.path or (self.key == "judge.template" and _TEMPLATE_FILE.fullmatch(text)):
            return expand_path(self.key, text)
        if self.key == "slurm.container_image" and _IMAGE_FILE.match(text):
            return expand_path(self.key, text)
        if self.key.startswith("slurm.container_mounts["):
            source, colon, target = text.partition(":")
            return f"{expand_path(self.key, source)}{colon}{target}"
        return text
