"""Allowed values of configuration keys, stored with their fields: `lr: float = setting(1e-6, minimum=0)`; checks of the
values, and rejection of keys that are set but have no effect."""

from __future__ import annotations

import copy
import math
import operator
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

from mcore_rl.config.functions import FORM, absolute_spec, names_function
from mcore_rl.config.reading.expansion import check_utf8
from mcore_rl.config.reading.remote_names import HUB, HubKind, is_url
from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
DOMAIN = "domain"
"""Key of the Domain in a field's metadata."""
MAX_SHOWN = 60
"""Maximum number of characters of a value in a message."""


@dataclass(frozen=True)
class Domain:
    """Allowed values of a key. The bounds `above` and `below` are exclusive.

    `function`: module_or_file.py:name of a user's function is also allowed. `path`: the value is a path, a list of
    paths, or a mapping with paths; `hub`: or a name on the hub; `urls`: or a URL. `one_or_more`: a single value stands
    for a list of one.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    function: bool = False
    path: bool = False
    unit: str | None = None
    one_or_more: bool = False
    hub: HubKind | None = None
    urls: bool = False

    @property
    def range(self) -> str | None:
        """Bounds in words, for messages."""
        return " and ".join(words for words, _, _ in self._bounds()) or None

    def violation(self, value: object) -> str | None:
        """Return the requirement that `value` (or an item of a list or mapping) violates, or None."""
        if isinstance(value, str):
            # A relative path would silently create a directory `s3:`.
            if self.path and is_url(value) and not self.urls and not (self.hub and value.startswith(HUB)):
                return f"a path on this machine{' or a name on the hub' if self.hub else ''}, not a URL"
            known = not self.choices or value in self.choices or (self.function and names_function(value))
            return None if known else self._listed()
        if isinstance(value, dict | list):
            items = value.values() if isinstance(value, dict) else value
            return next((demand for each in items if (demand := self.violation(each)) is not None), None)
        # bool is a subclass of int, but has no bounds. Other types are checked by OmegaConf.
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        # Also for keys without bounds.
        if not math.isfinite(value):
            return "a finite number"
        return next((words for words, bound, holds in self._bounds() if not holds(value, bound)), None)

    def _bounds(self) -> Iterator[tuple[str, float, Callable[[float, float], bool]]]:
        for words, bound, holds in (
            ("at least", self.minimum, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.maximum, operator.le),
            ("below", self.below, operator.lt),
        ):
            if bound is not None:
                yield "0 or more" if words == "at least" and not bound else f"{words} {bound:g}", bound, holds

    def _listed(self) -> str:
        # Some keys, such as rollout.max_logp_gap, allow a word or a number.
        number = f", or a number {self.range}" if self.range else ""
        return f"one of {', '.join(self.choices)}{f', or {FORM}' if self.function else number}"


def setting(
    default: T,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    function: bool = False,
    path: bool = False,
    unit: str | None = None,
    one_or_more: bool = False,
    hub: HubKind | None = None,
    urls: bool = False,
) -> T:
    """Create a dataclass field with a Domain."""
    domain = Domain(minimum, above, maximum, below, choices, function, path, unit, one_or_more, hub, urls)
    # A dataclass needs a factory for these, or all configurations would share one object.
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata={DOMAIN: domain})
    return field(default=default, metadata={DOMAIN: domain})


@cache
def field_types(section: object) -> dict[str, Any]:
    """Return the types of the fields of a dataclass. The modules of the schema keep annotations as text."""
    return get_type_hints(section)


@dataclass(frozen=True)
class Leaf:
    """Key of the configuration and the place of its value."""

    key: str
    section: DataclassInstance
    name: str
    domain: Domain

    @property
    def value(self) -> Any:
        return getattr(self.section, self.name)

    @property
    def type(self) -> object:
        hint: object = field_types(type(self.section))[self.name]
        return hint

    @property
    def may_be_null(self) -> bool:
        return type(None) in get_args(self.type)


def leaves(section: DataclassInstance, prefix: str = "") -> Iterator[Leaf]:
    """Yield all keys of a section and its subsections, including dataclasses in lists; keys start with `prefix`."""
    for each in fields(section):
        value = getattr(section, each.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from leaves(value, f"{prefix}{each.name}.")
        else:
            yield Leaf(f"{prefix}{each.name}", section, each.name, each.metadata.get(DOMAIN, Domain()))
            # The list is a key itself: it is set and shown as a whole. Its items have domains to check.
            if isinstance(value, list) and all(map(is_dataclass, value)):
                for number, item in enumerate(value):
                    yield from leaves(item, f"{prefix}{each.name}[{number}].")


def check_domains(section: DataclassInstance, prefix: str = "") -> None:
    """Raise ConfigError for the first value that its key does not allow."""
    for leaf in leaves(section, prefix):
        if (demand := leaf.domain.violation(leaf.value)) is not None:
            raise ConfigError(f"{leaf.key}={leaf.value} must be {demand}{', or null' if leaf.may_be_null else ''}")


class Changed(NamedTuple):
    """Key that is not at its default, with both values formatted."""

    key: str
    value: str
    default: str


def changed(section: str, given: DataclassInstance) -> Iterator[Changed]:
    """Yield every key that is not at its default in `given`, the dataclass at `section`, and its subsections."""
    # Defaults of subsections come from their parent: CriticConfig overrides those of its optimizer.
    defaults = {leaf.key: leaf.value for leaf in leaves(type(given)(), f"{section}.")}
    for leaf in leaves(given, f"{section}."):
        # Keys of dataclasses in a list have no default; the list does.
        if leaf.key in defaults and leaf.value != defaults[leaf.key]:
            yield Changed(leaf.key, written(leaf.value), written(defaults[leaf.key]))


def reject_unless_default(
    section: str, given: DataclassInstance, remedy: str, names: Collection[str] | None = None
) -> None:
    """Raise ConfigError for the first key of `names` (default: all keys of the section) that is not at its default.
    `remedy` names the setting with which the key has an effect."""
    for key, value, default in changed(section, given):
        if names is None or key.removeprefix(f"{section}.") in names:
            raise ConfigError(f"{key}={value} has no effect; {remedy}, or leave {key} at {default}")


def written(value: object) -> str:
    """Format a value for a message."""
    text = "null" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def make_paths_absolute(section: DataclassInstance) -> None:
    """Make all paths absolute, including the paths of users' files, because other processes may run in another
    directory.

    Raises: ConfigError if the working directory is not UTF-8.
    """
    for leaf in leaves(section):
        if leaf.domain.function and isinstance(leaf.value, dict):
            setattr(leaf.section, leaf.name, {key: absolute_spec(value) for key, value in leaf.value.items()})
        # rollout.tools may be a path or a function: only a function has a colon.
        elif leaf.domain.function and leaf.value and (names_function(leaf.value) or not leaf.domain.path):
            setattr(leaf.section, leaf.name, absolute_spec(leaf.value))
        elif leaf.domain.path and leaf.value:
            map_paths(leaf, _absolute)


def map_paths(leaf: Leaf, change: Callable[[str, str], str]) -> None:
    """Replace every path of a key by change(key, path)."""
    if leaf.value:
        setattr(leaf.section, leaf.name, _mapped(leaf.key, leaf.value, change))


def paths_of(leaf: Leaf) -> list[str]:
    """Return every path of a key."""
    found: list[str] = []

    def noted(key: str, path: str) -> str:
        found.append(path)
        return path

    if leaf.value:
        _mapped(leaf.key, leaf.value, noted)
    return found


def urls_of(section: DataclassInstance) -> dict[str, str]:
    """Return a URL of each key that has one; names on the hub are no URLs."""
    return {
        leaf.key: path
        for leaf in leaves(section)
        if leaf.domain.urls
        for path in paths_of(leaf)
        if is_url(path) and not path.startswith(HUB)
    }


def _mapped(key: str, paths: object, change: Callable[[str, str], str]) -> object:
    """Map the paths; a mapping to numbers has paths as keys, other mappings have paths as values."""
    if isinstance(paths, dict):
        if all(isinstance(value, list) for value in paths.values()):
            return {name: _mapped(f"{key}.{name}", value, change) for name, value in paths.items()}
        return {change(key, name): value for name, value in paths.items()}
    if isinstance(paths, list):
        return [change(key, path) for path in paths]
    return change(key, str(paths))


def _absolute(key: str, path: str) -> str:
    if is_url(path):
        return path
    path = os.path.abspath(path)
    check_utf8(key, path)
    return path
