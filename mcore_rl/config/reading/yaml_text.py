"""YAML dialect of configuration files and overrides."""

from __future__ import annotations

import re

import yaml

_INT = "tag:yaml.org,2002:int"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_NONE_WORD = "tag:mcore-rl,2026:none"


class NoneWord(str):
    """Unquoted `None`, `none` or `NONE`: null for a key that allows null."""

    __slots__ = ()


class YamlLoader(yaml.SafeLoader):
    """Loader of YAML 1.1 with changes: 1e-4 is a number (YAML 1.1: a string), 12:00:00 is a string (the number 43200),
    such as a time limit, and None is a NoneWord. Dates such as 2026-11-25 are strings, since directories are named by
    dates and no key is a date."""


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
YamlLoader.add_constructor(_NONE_WORD, lambda loader, node: NoneWord(node.value))


class YamlDumper(yaml.SafeDumper):
    """Dumper that quotes every string that YamlLoader would read as another type."""


YamlDumper.yaml_implicit_resolvers = YamlLoader.yaml_implicit_resolvers
