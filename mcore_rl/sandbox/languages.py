"""Commands that compile and run programs of each language."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError

SEARCH_PATH = "/usr/local/bin:/usr/bin"
"""Directories of programs that bubblewrap shows inside."""


@dataclass(frozen=True)
class Language:
    """A language. {python} in a command stands for sandbox.python.

    source: file name of the code.
    compile: command that writes `binary`; empty for interpreted languages.
    address_space: whether to limit the address space; garbage-collected runtimes reserve gigabytes at start.
    """

    source: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    binary: str = "main"
    address_space: bool = True


LANGUAGES = {
    "bash": Language("main.sh", ("bash", "main.sh")),
    "cpp": Language("main.cpp", ("./main",), ("g++", "-std=c++17", "-O2", "main.cpp", "-o", "main")),
    "lua": Language("main.lua", ("lua", "main.lua")),
    "nodejs": Language("main.js", ("node", "main.js"), address_space=False),
    "perl": Language("main.pl", ("perl", "main.pl")),
    "pytest": Language("test_main.py", ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_main.py")),
    "python": Language("main.py", ("{python}", "-u", "main.py")),
    "ruby": Language("main.rb", ("ruby", "main.rb")),
}


def find_language(name: str) -> Language:
    """Return an installed language. Raises: SandboxError if it is unknown or not installed."""
    if name not in LANGUAGES:
        raise SandboxError(f"language {name} is not known here, only {', '.join(LANGUAGES)}")
    language = LANGUAGES[name]
    program = (language.compile or language.run)[0]
    if program != "{python}" and shutil.which(program, path=SEARCH_PATH) is None:
        raise SandboxError(f"language {name}: {program} is not installed on this machine")
    return language


def resolve_command(command: tuple[str, ...], config: SandboxConfig) -> list[str]:
    """Replace the program of a command with its absolute path inside the sandbox."""
    python = os.path.abspath(config.python)
    program = python if command[0] == "{python}" else shutil.which(command[0], path=SEARCH_PATH) or command[0]
    return [program, *command[1:]]
