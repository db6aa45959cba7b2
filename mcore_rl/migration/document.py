"""Translated configuration as YAML, with the origin of each line as a comment."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from mcore_rl.config.reading.values import YamlDumper
from mcore_rl.migration.draft import OUR_DEFAULTS, Draft

INDENT = "  "


def as_yaml(draft: Draft, title: str) -> str:
    """Format the draft in the order of the schema. `title`: first comment."""
    order = {key: place for place, key in enumerate(OUR_DEFAULTS)}
    lines, open_sections = [f"# {title}"], list[str]()
    for key in sorted(draft.values, key=lambda key: order[key]):
        *sections, name = key.split(".")
        lines += _headings(open_sections, sections)
        open_sections = sections
        comment = " ".join(draft.origins[key].split())
        lines.append(f"{INDENT * len(sections)}{name}: {_written(draft.values[key])}  # {comment}")
    return "\n".join(lines) + "\n"


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
