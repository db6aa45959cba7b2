"""Commands `mcore-rl import-verl` and `mcore-rl import-slime`."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from mcore_rl.migration.draft import Translation
    from mcore_rl.migration.read_input import ReadInput

_VARIABLE = re.compile(r"[A-Za-z_]\w*|[1-9]\d?", re.ASCII)
"""Name of a shell variable, or number of an argument."""


def add_arguments(parser: argparse.ArgumentParser, *, trainer: str) -> None:
    """Add the options; `trainer` is verl or slime."""
    what = "SCRIPT_OR_YAML" if trainer == "verl" else "SCRIPT"
    parser.add_argument(
        "source", metavar=what, help="launch script" + (" or YAML configuration" if trainer == "verl" else "")
    )
    parser.add_argument(
        "--out", metavar="config.yaml", help="file to write; default: print on stdout, the lists on stderr"
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="variables",
        help="variable of the script, or 1=VALUE for its first argument; may be repeated",
    )
    parser.add_argument("--rows", type=int, metavar="N", help="number of training prompts, to turn epochs into steps")
    parser.add_argument(
        "--force", action="store_true", help="leave out settings without counterpart that change what is trained"
    )
    if trainer == "verl":
        parser.add_argument("--base", metavar="YAML", help="configuration that the script overrides (--config-name)")


def run(options: argparse.Namespace) -> int:
    """Translate a script, write the configuration and print the lists.

    Raises: ConfigError for a file of another kind, unknown values, or settings without counterpart.
    """
    try:
        return _import(options)
    except ConfigError as error:
        # Keys in the message are those of the other trainer, so no page about our keys fits.
        raise ConfigError(f"{error} (see docs/migration.md)") from error


def _import(options: argparse.Namespace) -> int:
    from mcore_rl.config.document import commented_yaml, write_new
    from mcore_rl.migration.acceptance import rejection
    from mcore_rl.migration.report import Report
    from mcore_rl.observe.terminal_text import printable

    if options.rows is not None and options.rows < 1:
        raise ConfigError(f"--rows={options.rows} must be at least 1")
    path = Path(options.source)
    read, (source, draft, uncovered) = _translated(options, path, _variables(options.variables))
    problems = dict.fromkeys([*source.problems, *([] if options.force else draft.blockers)])
    if problems:
        remedy = "" if options.force or not draft.blockers else ". --force leaves such settings out"
        # A value can be missing because a branch of the script was not read.
        skipped = f". Parts that were not followed: {'; '.join(read.notes)}" if source.problems and read.notes else ""
        raise ConfigError(f"{path} cannot be imported: {'; '.join(problems)}{remedy}{skipped}")
    title = f"Imported from {path.name} ({read.command}) by mcore-rl {options.verb}."
    text = commented_yaml(draft.values, draft.origins, title)
    report = Report(draft, uncovered, read.notes, rejection(text))
    # The lists quote the script, which may come from anywhere.
    lists = printable(report.as_text(options.out or "config.yaml"))
    if options.out is None:
        print(text, end="")
        print(lists, file=sys.stderr)
    else:
        write_new(text, Path(options.out))
        print(f"wrote {options.out}: {len(draft.values)} keys\n\n{lists}")
    return 0


def _translated(options: argparse.Namespace, path: Path, given: dict[str, str]) -> tuple[ReadInput, Translation]:
    """Read and translate the file with the importer of the verb."""
    if options.verb == "import-verl":
        from mcore_rl.migration.verl.reader import read_verl
        from mcore_rl.migration.verl.translation import translate

        read = read_verl(path, given, None if options.base is None else Path(options.base))
        return read, translate(read.settings, options.rows, path.stem)
    from mcore_rl.migration.slime.reader import read_slime
    from mcore_rl.migration.slime.translation import translate as translate_slime

    read = read_slime(path, given)
    return read, translate_slime(read.settings, options.rows, path.stem)


def _variables(words: list[str]) -> dict[str, str]:
    given = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise ConfigError(f"--set {word} must have the form NAME=VALUE, or 1=VALUE for the first argument")
        given[name] = value
    return given
