"""Scripts that a command starts: `bash -c SCRIPT`, `bash FILE.sh`, and their text."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.migration.files import read_text
from mcore_rl.migration.shell.words import UNKNOWN

SHELLS = ("bash", "sh", "zsh")


def script_argument(words: list[str]) -> str | None:
    """Return the script in `... bash -c SCRIPT`."""
    for place, word in enumerate(words[:-2]):
        option = words[place + 1]
        if word.rpartition("/")[2] in SHELLS and option.startswith("-") and option.endswith("c"):
            return words[place + 2]
    return None


def script_file(words: list[str]) -> int | None:
    """Return the place of FILE.sh in `... bash FILE.sh ...`, `sbatch FILE.sh` and `./FILE.sh ...`."""
    for place, word in enumerate(words[:-1]):
        if word.rpartition("/")[2] in (*SHELLS, "sbatch"):
            place = next((p for p in range(place + 1, len(words)) if not words[p].startswith("-")), place)
            return place if words[place].endswith(".sh") else None
    return 0 if "/" in words[0] and words[0].endswith(".sh") else None


def text_of_file(path: Path) -> str | None:
    """Return the text of a script; None if there is none at the path."""
    try:
        return read_text(path) if not UNKNOWN.search(str(path)) and path.is_file() else None
    except (ConfigError, OSError):
        return None


def find_script(path: str, directory: Path) -> tuple[Path, str] | None:
    """Search a script in a directory and its parents, since scripts are often started from the top of a repository.
    Returns its place and text."""
    for start in (directory, *directory.parents):
        text = text_of_file(start / path)
        if text is not None:
            return start / path, text
    return None
