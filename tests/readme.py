"""What README.md says that a reader would type: commands, settings, files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_COMMAND = re.compile(r"(make|mcore-rl|python|pip|source|sbatch|bash|(\./)?scripts/\S+\.sh)(\s|$)|scripts/\S+\.sh$")
_SETTING = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+=(?:'[^']*'|\S+)")


def readme() -> str:
    """README.md without its diagrams."""
    return re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def code_lines(text: str) -> list[str]:
    """The indented lines, each without its comment, and with those that a backslash continues."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("    ")]
    return [" ".join(re.split(r"\s{2,}#", line)[0].split()) for line in lines]


def inline_codes(text: str) -> list[str]:
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def commands(text: str) -> list[str]:
    """Every command, once, in its order: on a line of its own, or within prose unless that only names the beginning of
    another (`mcore-rl train`)."""
    lines = [line for line in code_lines(text) if _COMMAND.match(line)]
    named = [code for code in inline_codes(text) if _COMMAND.match(code)]
    return list(dict.fromkeys([*lines, *(name for name in named if not any(line.startswith(name) for line in lines))]))


def settings(text: str) -> Iterator[list[str]]:
    """The `key=value` of every piece of code that has some."""
    for code in [*code_lines(text), *inline_codes(text)]:
        found = [setting.replace("'", "") for setting in _SETTING.findall(code)]
        if found:
            yield found


def files(text: str) -> list[str]:
    """Every file or folder of the repository that is named: by its path, by a link, or as a recipe in configs/."""
    named = set(re.findall(r"\]\(([^):#]+)\)", text))
    for code in inline_codes(text):
        if re.fullmatch(r"(?:configs|docs|scripts|slurm|benchmarks|tests|mcore_rl|model_converters)/[\w./]*", code):
            named.add(code)
        if re.fullmatch(r"\w+_(?:cpu|gpus)\.yaml", code):
            named.add(f"configs/{code}")
    return sorted(named)
