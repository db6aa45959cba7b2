"""Completion in bash, zsh and fish: verbs, options, files, configuration keys and their values.

For each completion, the script of `mcore-rl completion SHELL` starts `mcore-rl` with variables that argcomplete reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import argcomplete
from argcomplete.completers import BaseCompleter, ChoicesCompleter, DirectoriesCompleter, FilesCompleter

from mcore_rl.config.fields import Leaf, leaves
from mcore_rl.config.schema import Config

_CONFIG_FILES = FilesCompleter(("yaml", "yml"))


def script(shell: str) -> str:
    """Return the code that enables completion of mcore-rl in a shell."""
    # Without defaults: bash would offer the files of the working directory as values of any key.
    text: str = argcomplete.shellcode(["mcore-rl"], use_defaults=False, shell=shell)
    return text


class Finder(argcomplete.CompletionFinder):
    """Completions of a command line. `order` arranges the complete words as the parser expects them."""

    order: Callable[[Sequence[str]], list[str]] = list

    def _get_completions(self, comp_words: list[str], *cursor: Any) -> list[str]:
        program, *words = comp_words
        found: list[str] = super()._get_completions([program, *self.order(words)], *cursor)
        return found


def finder(parser: argparse.ArgumentParser, order: Callable[[Sequence[str]], list[str]]) -> Finder:
    """Create the completions of a parser; options are offered after a dash only."""
    found = Finder(with_completers(parser), always_complete_options=False)
    found.order = order
    return found


def complete(parser: argparse.ArgumentParser, order: Callable[[Sequence[str]], list[str]]) -> None:
    """Send the completions of the current word to the shell and end the process. It has no effect if the shell has not
    asked for them."""
    finder(parser, order)(parser, always_complete_options=False)


def with_completers(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Set the completer of each argument that has a value, by its metavar, and return the parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                with_completers(verb)
        elif action.choices is None and action.nargs != 0:
            action.completer = COMPLETERS.get(str(action.metavar), ChoicesCompleter({}))  # type: ignore[attr-defined]
    return parser


class WordCompleter(BaseCompleter):
    """Further configuration files, and overrides."""

    def __call__(self, *, prefix: str, **kwargs: object) -> list[str]:
        """Return files and the next part of a key, or the values of a complete key."""
        key, equals, value = prefix.partition("=")
        if not equals:
            return [*complete_key(prefix, end="="), *_CONFIG_FILES(prefix)]
        leaf = next((leaf for leaf in leaves(Config()) if leaf.key == key), None)
        return [] if leaf is None else [f"{key}={each}" for each in _values(leaf, value)]


class KeyCompleter(BaseCompleter):
    """Names of sections and keys."""

    def __call__(self, *, prefix: str, **kwargs: object) -> list[str]:
        return complete_key(prefix)


def complete_key(prefix: str, end: str = "") -> list[str]:
    """Return the sections and keys that continue `prefix` by one part; `end` follows a key.

    A section that is the only completion is replaced by its contents: shells put a blank after a single one.
    """
    keys = [leaf.key for leaf in leaves(Config()) if leaf.key.startswith(prefix)]
    while True:
        found = list(dict.fromkeys(_next_part(key, prefix, end) for key in keys))
        if len(found) != 1 or not found[0].endswith("."):
            return found
        prefix = found[0]


def _next_part(key: str, prefix: str, end: str) -> str:
    part, dot, _ = key[len(prefix) :].partition(".")
    return f"{prefix}{part}{dot or end}"


def _values(leaf: Leaf, value: str) -> Iterator[str]:
    """Yield the allowed values of a key, as far as they can be listed, and files for a key with paths."""
    yield from leaf.domain.choices
    if isinstance(leaf.value, bool):
        yield from ("true", "false")
    if leaf.may_be_null:
        yield "null"
    if leaf.domain.path or leaf.domain.function:
        yield from FilesCompleter()(value)


_DIRECTORIES, _FILES = DirectoriesCompleter(), FilesCompleter()
COMPLETERS: Mapping[str, BaseCompleter] = {
    "CONFIG.yaml": _CONFIG_FILES,
    "MORE.yaml|key=value": WordCompleter(),
    "WORD": KeyCompleter(),
    **dict.fromkeys(("RUN_DIR", "A", "B", "DIR"), _DIRECTORIES),
    **dict.fromkeys(("FILE", "SCRIPT", "SCRIPT_OR_YAML", "YAML", "config.yaml"), _FILES),
}
"""Completer by metavar. Other arguments, such as numbers, have none."""
