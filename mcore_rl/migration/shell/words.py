"""Words of a command with their lines, and variables of a script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from mcore_rl.errors import ConfigError

UNKNOWN = re.compile(r"\$\{(\w+)\}|\$\((.*)\)", re.DOTALL)
"""Part of a word that the script does not determine: an environment variable, or the output of a command."""
MAX_SIZE = 2**20
"""Maximum number of characters of a variable, or items of an array: a script can double them in every line."""


class Word(NamedTuple):
    """Word of a command and the line on which it is written. Unknown parts have the form `${NAME}` or `$(command)`."""

    text: str
    line: int


Sized = TypeVar("Sized", str, list[Word])


@dataclass
class Variables:
    """Variables of a script: texts and arrays. A variable without an entry is unset, or set in the environment."""

    texts: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    positional: list[Word] = field(default_factory=list)
    """Arguments `$1`, `$2`, ..."""
    directory: Path = field(default_factory=Path)
    """Directory of the script."""

    @classmethod
    def given(cls, values: Mapping[str, str], directory: Path) -> Variables:
        """Create the variables of a script that starts with `values`; names that are numbers are arguments."""
        numbers = sorted(int(name) for name in values if name.isdigit())
        variables = cls({name: text for name, text in values.items() if not name.isdigit()}, directory=directory)
        variables.positional = [Word(values.get(str(i), f"${{{i}}}"), 0) for i in range(1, max(numbers, default=0) + 1)]
        return variables

    def get(self, name: str) -> str | None:
        """Return the value of `$name`; None if the script does not set it."""
        if name.isdigit() and name != "0":
            # A longer number is no place in a list, and int() rejects thousands of digits.
            place = int(name[:9]) - 1
            return self.positional[place].text if place < len(self.positional) else None
        if name in self.arrays:
            # An array without an index is its first item.
            return self.arrays[name][0].text if self.arrays[name] else ""
        return self.texts.get(name)

    def items(self, name: str) -> list[Word] | None:
        """Return the items of `${name[@]}`; None if the script does not set it."""
        if name in self.arrays:
            return self.arrays[name]
        return [Word(self.texts[name], 0)] if name in self.texts else None

    def set(self, name: str, text: str, *, append: bool = False) -> None:
        """Set a text, or append to it."""
        if append and name in self.arrays:
            self.arrays[name][:1] = (
                [Word(self.arrays[name][0].text + text, 0)] if self.arrays[name] else [Word(text, 0)]
            )
            return
        self.arrays.pop(name, None)
        self.texts[name] = _limited(name, (self.texts.get(name, "") if append else "") + text)

    def set_array(self, name: str, items: list[Word], *, append: bool = False) -> None:
        """Set an array, or append to it."""
        before = (self.items(name) or []) if append else []
        self.texts.pop(name, None)
        self.arrays[name] = _limited(name, [*before, *items])

    def copy(self) -> Variables:
        """Return a copy; changes of one do not change the other."""
        arrays = {name: list(items) for name, items in self.arrays.items()}
        return Variables(dict(self.texts), arrays, list(self.positional), self.directory)

    def restore(self, name: str, before: Variables) -> None:
        """Give a variable the value that it has in `before`."""
        self.forget(name)
        if name in before.arrays:
            self.arrays[name] = before.arrays[name]
        elif name in before.texts:
            self.texts[name] = before.texts[name]

    def forget(self, name: str) -> None:
        """Remove a variable whose value is not known any more."""
        self.texts.pop(name, None)
        self.arrays.pop(name, None)


def _limited(name: str, value: Sized) -> Sized:
    """Return `value`. Raises: ConfigError if it is too large for a launch script."""
    if len(value) > MAX_SIZE:
        raise ConfigError(f"the variable {name} of the script becomes larger than {MAX_SIZE}; write its value")
    return value
