"""Code blocks of README.md and docs/, and the shell commands in them.

An indented block, and a fence of a shell, consists of commands. Everything else is in a fence that names its language.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it import MarkdownIt

from tests.readme import ROOT

SHELLS = frozenset({"", "bash", "console", "sh", "shell"})
"""Languages of command blocks. An indented block has no language."""
OTHER_LANGUAGES = frozenset({"json", "mermaid", "python", "text", "yaml", "{toctree}"})


@dataclass(frozen=True)
class CodeBlock:
    """A code block: its page relative to the repository, the number of its first line, language, and text."""

    page: str
    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """Return the commands without comments. Lines that a backslash continues are joined."""
        lines = (re.sub(r"(^|\s)#\s.*", "", line) for line in self.text.replace("\\\n", " ").splitlines())
        return [command for line in lines if (command := " ".join(line.split()))]


def pages() -> list[str]:
    """Return README.md and the pages of docs/ that are in the repository, relative to it."""
    # The reference of the keys is generated when the site is built.
    docs = (path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md")))
    return ["README.md", *(str(path) for path in docs if path.parts[1] != "keys")]


def code_blocks(page: str, text: str | None = None) -> list[CodeBlock]:
    """Return the code blocks of a page, by default as in the repository."""
    tokens = MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8") if text is None else text)
    return [
        CodeBlock(page, token.map[0] + 1, (token.info.split() or [""])[0], token.content)
        for token in tokens
        if token.type in {"code_block", "fence"} and token.map is not None
    ]


def block_that_begins(page: str, beginning: str) -> str:
    """Return the text of the page's only code block that begins so."""
    (block,) = (block for block in code_blocks(page) if block.text.startswith(beginning))
    return block.text


def documented_commands() -> list[str]:
    """Return the commands of all command blocks once, in order."""
    blocks = (block for page in pages() for block in code_blocks(page) if block.language in SHELLS)
    return list(dict.fromkeys(command for block in blocks for command in block.commands()))
