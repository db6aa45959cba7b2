"""Settings of another trainer: keys with values and lines, its defaults, and which keys were read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import yaml

from mcore_rl.config.reading.values import NoneWord, YamlLoader
from mcore_rl.errors import ConfigError
from mcore_rl.migration.shell.words import UNKNOWN

MAX_DEPTH = 20
"""Maximum number of nested sections."""
MAX_SHOWN = 60
"""Maximum length of a value in a message."""


@dataclass(frozen=True)
class Setting:
    """Value of a key. line: line in the script; None for a file or a default."""

    key: str
    value: object
    line: int | None = None

    @property
    def origin(self) -> str:
        """Key and line, for comments."""
        return self.key if self.line is None else f"{self.key}, line {self.line}"

    @property
    def shown(self) -> str:
        """Key and value, for lists."""
        text = "null" if self.value is None else str(self.value)
        return f"{self.key}={text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '...'}"


@dataclass
class Source:
    """Settings of a run of another trainer.

    defaults: its value of each key that a run does not set. prefix: text before a key's name in messages, such as --.
    name: name of a run that has none.
    problems: values that could not be read, for one message.
    """

    trainer: str
    settings: dict[str, Setting]
    defaults: Mapping[str, object]
    prefix: str = ""
    name: str = "imported"
    used: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def find(self, *keys: str) -> Setting | None:
        """Return the setting of the first of `keys` that the run sets; all of them count as read."""
        self.used.update(keys)
        return next((self.settings[key] for key in keys if key in self.settings), None)

    def effective(self, *keys: str) -> Setting:
        """Return the setting of the first key that the run sets, or else the first default."""
        found = self.find(*keys)
        if found is not None:
            return found
        key = next((key for key in keys if key in self.defaults), keys[0])
        return Setting(f"{self.prefix}{key}", self.defaults.get(key))

    def is_set(self, *keys: str) -> bool:
        """Return True if the run sets one of `keys`."""
        return self.find(*keys) is not None

    def text(self, *keys: str) -> str | None:
        """Return the value as text; None for null or an empty text."""
        value = self.effective(*keys).value
        return None if value is None or value == "" else str(value)

    def flag(self, *keys: str) -> bool:
        """Return the value as a boolean; null is false."""
        setting = self.effective(*keys)
        if isinstance(setting.value, bool):
            return setting.value
        word = str(setting.value).lower()
        if word not in ("true", "false", "none", "1", "0", ""):
            self.reject(setting, "true or false")
        return word in ("true", "1")

    def integer(self, *keys: str) -> int:
        """Return the value as an integer; 0 for null, and after an unreadable value."""
        return int(self.number(*keys))

    def number(self, *keys: str) -> float:
        """Return the value as a number; 0 for null, and after an unreadable value."""
        setting = self.effective(*keys)
        if setting.value is None:
            return 0
        try:
            value = setting.value if isinstance(setting.value, int | float) else float(str(setting.value))
            if math.isfinite(value):
                return value
        except (ValueError, OverflowError):
            pass
        self.reject(setting, "a number")
        return 0

    def unread(self) -> list[Setting]:
        """Return the settings that no translation read, in their order."""
        return [setting for key, setting in self.settings.items() if key not in self.used]

    def reject(self, setting: Setting, expected: str, value: object = None) -> None:
        """Add a problem: the setting's value, or the part `value` of it, is not what it should be."""
        place = "" if setting.line is None else f" (line {setting.line})"
        remedy = unknown_remedy(str(setting.value if value is None else value))
        self.problems.append(f"{setting.shown}{place} is not {expected}{remedy}")


def unknown_remedy(text: str) -> str:
    """Describe how to provide the unknown parts of a text; empty if there are none."""
    # Arguments such as ${1} first: paths may have names of environment variables.
    names = sorted(re.findall(r"\$\{(\w+)", text), key=lambda name: not name.isdigit())
    if names:
        return f": the script does not set {names[0]}; add --set {names[0]}=VALUE"
    return ": commands of the script are not run; write the value into the script" if UNKNOWN.search(text) else ""


def parsed_value(text: str) -> object:
    """Read the value of an override: YAML in flow style, with the keyword None; another text is kept."""
    try:
        value: object = yaml.load(text, Loader=YamlLoader) if text else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return text
    if isinstance(value, NoneWord):
        return None
    # Block style, as in "a: b", is not meant on a command line.
    if isinstance(value, dict | list) and not text.lstrip().startswith(("{", "[")):
        return text
    # Hydra accepts {key:value}, which YAML reads as a key without a value.
    if isinstance(value, dict) and all(each is None for each in value.values()) and value:
        spaced = re.sub(r"(?<=[\w\"']):(?=\S)", ": ", text)
        return parsed_value(spaced) if spaced != text else value
    return text if isinstance(value, str) and not text.lstrip().startswith(("'", '"')) else value


def flattened(tree: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Yield the leaves of nested mappings with dotted keys; an empty mapping is a leaf.

    Raises: ConfigError for mappings that contain themselves or are nested too deeply.
    """
    if prefix.count(".") > MAX_DEPTH:
        raise ConfigError(f"{prefix.removesuffix('.')[:MAX_SHOWN]}... is nested too deeply")
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{key}.")
        else:
            yield key, value
