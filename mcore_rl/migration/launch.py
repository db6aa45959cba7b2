"""Selection of the training command among the commands of a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcore_rl.migration.shell.words import Word

_MODULE_FLAG = "-m"
_CONTINUATION = re.compile(r"--\w[\w-]*(=.*)?|[+~]*\w+(\.[\w@/-]+)+=.*", re.DOTALL)
"""Word that cannot be a program: a flag, or an override of a nested key."""


@dataclass(frozen=True)
class Launch:
    """Command that starts training: the program with its line, options before the program, and its arguments."""

    program: str
    line: int
    options: list[Word]
    arguments: list[Word]


def find_launches(commands: Sequence[list[Word]], is_argument: Callable[[str], bool]) -> list[Launch]:
    """Return the commands with arguments of the trainer, the one with most arguments first.

    Wrappers such as `ray job submit ... --`, torchrun, srun and env come before the program and are skipped.
    is_argument: True for an argument that only this trainer has.
    """
    found = []
    for words in commands:
        count = sum(is_argument(word.text) for word in words)
        if count:
            found.append((count, _split(words, is_argument)))
    # sorted() is stable: the first of equal commands stays first.
    return [launch for _, launch in sorted(found, key=lambda each: -each[0])]


def joined_commands(commands: Sequence[list[Word]]) -> tuple[list[list[Word]], list[str]]:
    """Join the lines of a command whose continuation ends too early: a missing backslash, or blanks or a comment after
    it. The shell would call the rest of the arguments a command. Returns the commands, and a note per joined line."""
    joined: list[list[Word]] = []
    notes = []
    for command in commands:
        # A backslash before a blank is a word of one blank.
        words = [word for word in command if word.text.strip()]
        if words and joined and _CONTINUATION.fullmatch(words[0].text) and _has_arguments(joined[-1]):
            joined[-1] = [*joined[-1], *words]
            notes.append(
                f"line {words[0].line}: the shell ends the command before this line, because a backslash is missing or "
                "is not the last character; the arguments are read as one command"
            )
        elif words:
            joined.append(words)
    return joined, notes


def _has_arguments(words: list[Word]) -> bool:
    return any(_CONTINUATION.fullmatch(word.text) for word in words)


def _split(words: list[Word], is_argument: Callable[[str], bool]) -> Launch:
    first = next(place for place, word in enumerate(words) if is_argument(word.text))
    if first == 0:
        return Launch("", words[0].line, [], words)
    place, program = _program(words[:first])
    return Launch(program, words[0].line, words[:place], words[place + 1 :])


def _program(words: list[Word]) -> tuple[int, str]:
    """Return place and name of the program: the last `-m MODULE` or file.py, or the first word without either."""
    modules = [p + 1 for p, word in enumerate(words[:-1]) if word.text == _MODULE_FLAG]
    files = [p for p, word in enumerate(words) if re.search(r"\.py$", word.text) and not word.text.startswith("-")]
    place = max(modules + files, default=0)
    return place, words[place].text


def flag_values(words: Sequence[Word]) -> dict[str, tuple[list[str], int]]:
    """Parse `--flag value ...` and `--flag=value`: name without dashes -> values and line. The last one counts."""
    found: dict[str, tuple[list[str], int]] = {}
    name: str | None = None
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text[2:].partition("=")
            found[name] = ([value] if equals else [], word.line)
        elif name is not None:
            found[name][0].append(word.text)
    return found
