"""Catalogue of all configuration keys, as printed by `mcore-rl keys`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import cache

import yaml
from omegaconf import MISSING

from mcore_rl.config.fields import Leaf, leaves
from mcore_rl.config.functions import FORM
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

WIDTH = 80
"""Width of the printed texts, in characters."""
UNITS = {
    "GiB/s": "gib_per_second",
    "%": "percent",
    "bytes": "bytes",
    "buckets": "buckets",
    "chunks": "vpp",
    "CPUs": "cpus_per_node",
    "engines": "engines",
    "GiB": "gib",
    "layers": "layers",
    "MiB": "mib",
    "nodes": "nodes",
    "passes": "epochs",
    "ranks": "cp ep etp ranks tp",
    "responses": "samples samples_per_prompt",
    "seconds": "seconds",
    "sequences": "requests",
    "slots": "gpus_per_node",
    "stages": "pp",
    "steps": "steps",
    "TFLOP/s": "tflops",
    "tokens": "tokens tokens_per_microbatch",
}
"""Units, with the endings of the names of keys that have them; other units are set with the field."""


@dataclass(frozen=True)
class KeyEntry:
    """Description of a key. `required`: there is no default. `choices`: all values except null."""

    key: str
    type: str
    default: object
    required: bool
    unit: str | None
    range: str | None
    choices: tuple[str, ...]
    text: str

    @property
    def written_default(self) -> str | None:
        """The default as in a configuration file; None if the key is required."""
        return None if self.required else _written(self.default)

    def shown(self) -> str:
        """Format for a terminal: the key with its default and allowed values, then the description."""
        default = "" if self.required else f" = {self.written_default}"
        facts = [self.type, "required" if self.required else None, self.unit, self.range, " | ".join(self.choices)]
        head = f"{self.key}{default}  [{', '.join(fact for fact in facts if fact)}]"
        lines = textwrap.wrap(head, WIDTH, subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join([*lines, textwrap.indent(textwrap.fill(self.text, WIDTH - 4), "    ")])


def find_keys(word: str = "") -> list[KeyEntry]:
    """Return the keys with `word` in their name or at the beginning of a word of their description; all keys by
    default.

    Raises: ConfigError if there is none.
    """
    # Match at the start of words only: "tp" would otherwise match "http".
    begins = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    keys = [entry for entry in map(_entry, leaves(Config())) if word.lower() in entry.key or begins.search(entry.text)]
    if not keys:
        raise ConfigError(f"no key has {word!r} in its name or description; `mcore-rl keys` lists all keys")
    return keys


def _entry(leaf: Leaf) -> KeyEntry:
    # A class has a short name; unions and generic types only have a readable str().
    name = getattr(leaf.type, "__name__", str(leaf.type)) if isinstance(leaf.type, type) else str(leaf.type)
    required = leaf.value == MISSING
    unit = leaf.domain.unit or next(
        (unit for unit, ends in UNITS.items() if any(f"_{leaf.name}".endswith(f"_{end}") for end in ends.split())), None
    )
    return KeyEntry(
        leaf.key,
        re.sub(r"\btyping\.", "", name),
        None if required else leaf.value,
        required,
        unit,
        leaf.domain.range,
        (*leaf.domain.choices, FORM) if leaf.domain.function else leaf.domain.choices,
        _text(type(leaf.section), leaf.name),
    )


def _text(section: type, name: str) -> str:
    """Return the string below a field, in the class or in a base class."""
    # Without object, which has no source.
    return next((texts[name] for texts in map(_texts, section.__mro__[:-1]) if name in texts), "")


@cache
def _texts(section: type) -> dict[str, str]:
    """Return the strings below the fields of a class. They exist only in the source code."""
    # Python discards a string below a field, so it has to be read from the source.
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for above, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(above.target, ast.Name)
            texts[above.target.id] = " ".join(str(below.value.value).split())
    return texts


def _written(value: object) -> str:
    """Format a value as in a configuration file, on one line."""
    # Only text in double quotes has escaped line breaks.
    style = '"' if isinstance(value, str) and "\n" in value else None
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
