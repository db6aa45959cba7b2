"""Generate the reference of all configuration keys for the documentation site: docs/keys/, one page per section.

python scripts/keys_pages.py

`make docs` does this before it builds the site. The pages are not in the repository: they have the contents of
`mcore-rl keys`, with links between keys and to the pages that mention them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.catalogue import KeyEntry, find_keys
from mcore_rl.config.fields import leaves
from mcore_rl.config.schema import Config

DOCS = Path(__file__).parent.parent / "docs"
FOLDER = DOCS / "keys"
HEADER = """\
# Configuration keys

After reading this page you can find a key by its section. `mcore-rl keys WORD` prints the keys with WORD in name or
description. [Configuration](../configuration.md) describes files, overrides and common settings.

| section | keys | about |
|---|---|---|
"""
KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)+\b")
"""Text that may be a key."""
_LINKED = re.compile(rf"\bdocs/(?P<page>[\w-]+\.md)\b|{KEY.pattern}")
_CODE = re.compile(r"(`[^`]*`)")
_MARKUP = re.compile(r"[\\`*_<>\[\]{}$|#]")
"""Characters with a meaning in MyST."""


@dataclass(frozen=True)
class Reference:
    """Contents of the reference.

    about: description of each section and subsection; "" if its class has no docstring.
    mentions: title and file name of the pages that mention a key.
    """

    entries: Sequence[KeyEntry]
    about: Mapping[str, str]
    mentions: Mapping[str, Sequence[tuple[str, str]]]

    def pages(self) -> dict[str, str]:
        """Render the pages by file name. Sections and keys keep the order of the schema."""
        sections = _grouped(self.entries, _top)
        abouts = {name: self._markdown(self.about.get(name, "")) for name in sections}
        rows = [f"| [{name}]({name}.md) | {len(found)} | {abouts[name]} |" for name, found in sections.items()]
        index = [HEADER + "\n".join(rows), "", *_directive("toctree", "", [":hidden:", "", *sections])]
        texts = {name: [f"# {name}", "", *self._page(found)] for name, found in sections.items()}
        return {f"{name}.md": "\n".join(lines).rstrip() + "\n" for name, lines in {"index": index, **texts}.items()}

    def _page(self, entries: Sequence[KeyEntry]) -> Iterator[str]:
        """Yield the lines of a section's page: its own keys, then each subsection under a heading."""
        subsections = _grouped(entries, _parent)
        for section in sorted(subsections, key=lambda name: name != _top(name)):
            if section != _top(section):
                yield from (f"## {section}", "")
            if about := self.about.get(section):
                yield from (self._markdown(about), "")
            for entry in subsections[section]:
                yield from (*self._key(entry), "")

    def _key(self, entry: KeyEntry) -> Iterator[str]:
        """Yield the lines of Sphinx's directive for a configuration key."""
        options = {"type": entry.type, "default": entry.written_default}
        # In double quotes, like text in YAML: a default may contain a colon or begin with a bracket.
        lines = [f':{name}: "`{_quoted(value)}`"' for name, value in options.items() if value is not None]
        choices = ", ".join(f"`{choice}`" for choice in entry.choices)
        facts = {"Unit": entry.unit, "Range": entry.range, "Values": choices}
        stated = ["Required."] * entry.required + [f"{name}: {fact}." for name, fact in facts.items() if fact]
        pages = ", ".join(f"[{title}](../{file})" for title, file in self.mentions.get(entry.key, ()))
        for paragraph in (self._markdown(entry.text), " ".join(stated), f"See {pages}." if pages else ""):
            if paragraph:
                lines += ["", paragraph]
        yield from _directive("confval", entry.key, lines)

    def _markdown(self, text: str) -> str:
        """Convert a docstring to MyST: keys and pages become links, code stays, and other text is escaped."""
        keys = {entry.key for entry in self.entries}
        parts = []
        for part in _CODE.split(text):
            if part.startswith("`") and part.endswith("`"):
                parts.append(f"{{confval}}{part}" if part.strip("`") in keys else part)
                continue
            place = 0
            for match in _LINKED.finditer(part):
                if match["page"] or match[0] in keys:
                    link = f"[{match[0]}](../{match['page']})" if match["page"] else f"{{confval}}`{match[0]}`"
                    parts += [_escaped(part[place : match.start()]), link]
                    place = match.end()
            parts.append(_escaped(part[place:]))
        return "".join(parts)


def reference() -> Reference:
    """Collect the keys of the schema, and the pages in docs/ that mention them."""
    entries = find_keys()
    return Reference(entries, _descriptions(), mentions([entry.key for entry in entries]))


def mentions(keys: Collection[str], docs: Path = DOCS) -> dict[str, list[tuple[str, str]]]:
    """Return title and file name of the pages in `docs` that mention each key, in the order of file names."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(docs.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        for key in set(KEY.findall(text)) & set(keys):
            found[key].append((title, path.name))
    return found


def write_pages(folder: Path = FOLDER) -> list[Path]:
    """Write the pages and remove pages of former sections. An unchanged file is not written, so that Sphinx does not
    read it again."""
    folder.mkdir(exist_ok=True)
    texts = {folder / name: text for name, text in reference().pages().items()}
    for stale in set(folder.glob("*.md")) - set(texts):
        stale.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return list(texts)


def _descriptions() -> dict[str, str]:
    classes = {_parent(leaf.key): type(leaf.section) for leaf in leaves(Config())}
    # A dataclass without a docstring gets its signature as one.
    return {
        name: "" if (text := kind.__doc__ or "").startswith(f"{kind.__name__}(") else " ".join(text.split())
        for name, kind in classes.items()
    }


def _grouped(entries: Sequence[KeyEntry], group_of: Callable[[str], str]) -> dict[str, list[KeyEntry]]:
    groups: dict[str, list[KeyEntry]] = {}
    for entry in entries:
        groups.setdefault(group_of(entry.key), []).append(entry)
    return groups


def _directive(name: str, argument: str, lines: Sequence[str]) -> list[str]:
    return [f"```{{{name}}} {argument}".rstrip(), *lines, "```"]


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _top(key: str) -> str:
    return key.partition(".")[0]


if __name__ == "__main__":
    print(*write_pages(), sep="\n")
