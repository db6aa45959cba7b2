"""Rejection of keys that the schema does not have, with the nearest existing key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from mcore_rl.config.aliases import nearest
from mcore_rl.config.fields import leaves
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError


def known_keys() -> list[str]:
    """Return all leaf keys of the schema, dotted and sorted."""
    return sorted(leaf.key for leaf in leaves(Config()))


def reject_unknown(tree: dict[str, Any], source: str) -> None:
    """Raise ConfigError for the first key of the tree that does not exist."""
    for key in _unknown(tree, Config, ""):
        # A section is a useful suggestion only if the key is not already in it.
        others = [section for section in _sections(Config, "") if not key.startswith(f"{section}.")]
        near = nearest(key, [*known_keys(), *others])
        hint = f"did you mean {near}?" if near is not None else _no_such_key(key)
        raise ConfigError(f"{source}: unknown key {key}; {hint}")


def _no_such_key(key: str) -> str:
    """List the keys of the deepest existing section of `key`, else the sections."""
    node: Any = Config
    parts, depth = key.split("."), 0
    while depth < len(parts) and is_dataclass(get_type_hints(node).get(parts[depth])):
        node, depth = get_type_hints(node)[parts[depth]], depth + 1
    names = ", ".join(each.name for each in fields(node))
    where = f"{'.'.join(parts[:depth])} has the keys" if depth else "the sections are"
    return f"no key has this name or a similar one ({where} {names}; `mcore-rl keys WORD` searches all keys)"


def _unknown(tree: dict[str, Any], node: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(node)
    for name, value in tree.items():
        if name not in hints:
            yield _first_leaf(f"{prefix}{name}", value)
        elif is_dataclass(hints[name]):
            if not isinstance(value, dict):
                example = fields(hints[name])[0].name
                raise ConfigError(f"{prefix}{name} is a section; set the keys in it, such as {prefix}{name}.{example}")
            yield from _unknown(value, hints[name], f"{prefix}{name}.")


def _first_leaf(key: str, value: Any) -> str:
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _sections(node: Any, prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(node).items():
        if is_dataclass(hint):
            yield f"{prefix}{name}"
            yield from _sections(hint, f"{prefix}{name}.")
