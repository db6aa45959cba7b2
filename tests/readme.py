"""Commands, settings and files that README.md and the pages of its first steps show to users."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    *(
        f"docs/{page}.md"
        for page in (
            "quickstart",
            "configuration",
            "papers",
            "recipes",
            "run-directory",
            "report",
            "conversion",
            "diagnostics",
            "benchmarks",
            "migration",
        )
    ),
)
_COMMAND = re.compile(r"(make|mcore-rl|python|pip|source|sbatch|bash|(\./)?scripts/\S+\.sh)(\s|$)|scripts/\S+\.sh$")
_SETTING = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+=(?:'[^']*'|\S+)")


def readme() -> str:
    """Return the text of PAGES without diagrams. Links are relative to the repository."""
    texts = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        if page.startswith("docs/"):
            text = re.sub(r"\]\((?!https?:|#)", "](docs/", text)
        texts.append(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    return "\n".join(texts)


def code_lines(text: str) -> list[str]:
    """Return the indented lines without comments; lines that a backslash continues are joined."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("    ")]
    return [" ".join(re.split(r"\s{2,}#", line)[0].split()) for line in lines]


def inline_codes(text: str) -> list[str]:
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def commands(text: str) -> list[str]:
    """Return every command once, in order. Commands within prose count unless they only name the beginning of another
    one (`mcore-rl train`)."""
    lines = [line for line in code_lines(text) if _COMMAND.match(line)]
    named = [code for code in inline_codes(text) if _COMMAND.match(code)]
    return list(dict.fromkeys([*lines, *(name for name in named if not any(line.startswith(name) for line in lines))]))


def settings(text: str) -> Iterator[list[str]]:
    """Yield the `key=value` settings of every code line and inline code that has some."""
    for code in [*code_lines(text), *inline_codes(text)]:
        found = [setting.replace("'", "") for setting in _SETTING.findall(code)]
        if found:
            yield found


def files(text: str) -> list[str]:
    """Return the files and folders that are named by path, by link, or as a recipe in configs/."""
    named = set(re.findall(r"\]\(([^):#]+)\)", text))
    for code in inline_codes(text):
        if re.fullmatch(r"(?:configs|docs|scripts|slurm|benchmarks|tests|mcore_rl|model_converters)/[\w./]*", code):
            named.add(code)
        if re.fullmatch(r"\w+_(?:cpu|gpus)\.yaml", code):
            named.add(f"configs/{code}")
    return sorted(named)
