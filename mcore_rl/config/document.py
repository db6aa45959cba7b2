"""Configuration files that commands write: YAML in the order of the schema, with a comment on each line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from mcore_rl.config.fields import leaves
from mcore_rl.config.reading.values import YamlDumper
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from model_converters.durable_files import durable_write

INDENT = "  "


def commented_yaml(values: Mapping[str, object], comments: Mapping[str, str], title: str) -> str:
    """Format keys with their values and comments. `title`: first comment, which may have several lines."""
    order = {leaf.key: place for place, leaf in enumerate(leaves(Config()))}
    lines, open_sections = [f"# {line}" for line in title.splitlines()], list[str]()
    for key in sorted(values, key=lambda key: order[key]):
        *sections, name = key.split(".")
        lines += _headings(open_sections, sections)
        open_sections = sections
        comment = " ".join(comments[key].split())
        lines.append(f"{INDENT * len(sections)}{name}: {_written(values[key])}  # {comment}")
    return "\n".join(lines) + "\n"


def check_new(target: Path) -> None:
    """Raise ConfigError if something else than an empty file would be replaced."""
    if target.exists() and not (target.is_file() and not target.stat().st_size):
        raise ConfigError(f"--out={target} exists; remove it, or write another file")


def write_new(text: str, target: Path) -> None:
    """Write a new file and missing parent directories. Raises: ConfigError if it exists or cannot be written."""
    check_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The target of a link: a rename would replace the link, such as /dev/stdout, by the file.
        with durable_write(target.resolve()) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"--out={target} cannot be written: {error.strerror}; write another file") from None


def _headings(before: list[str], sections: list[str]) -> Iterator[str]:
    """Yield the lines that open `sections` after a line in the sections `before`."""
    same = next((i for i, (a, b) in enumerate(zip(before, sections, strict=False)) if a != b), None)
    shared = min(len(before), len(sections)) if same is None else same
    for depth, section in enumerate(sections[shared:], shared):
        yield f"{INDENT * depth}{section}:"


def _written(value: object) -> str:
    if isinstance(value, float):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return re.sub(r"e([-+])0+(?=\d)", r"e\1", text)  # 1e-6 instead of 1e-06
    text = yaml.dump(value, Dumper=YamlDumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")
