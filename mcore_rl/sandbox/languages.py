"""How programs of each language are compiled and started; what is installed decides which of them there are."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError

SEARCH_PATH = "/usr/local/bin:/usr/bin"
"""What bubblewrap shows of the host's programs."""


@dataclass(frozen=True)
class Language:
    """`source` is what the code's file is called; {python} in a command is the configured interpreter.

    compile: a command that leaves `binary`. address_space: whether a limit on it can be borne: runtimes with a garbage
    collector of their own reserve gigabytes at once.
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
    """Raises: SandboxError if it is not known, or not installed."""
    if name not in LANGUAGES:
        raise SandboxError(f"language {name} is not known here, only {', '.join(LANGUAGES)}")
    language = LANGUAGES[name]
    program = (language.compile or language.run)[0]
    if program != "{python}" and shutil.which(program, path=SEARCH_PATH) is None:
        raise SandboxError(f"language {name}: {program} is not installed on this machine")
    return language


def filled(command: tuple[str, ...], config: SandboxConfig) -> list[str]:
    """The command with full paths, as it is called inside."""
    python = os.path.abspath(config.python)
    program = python if command[0] == "{python}" else shutil.which(command[0], path=SEARCH_PATH) or command[0]
    return [program, *command[1:]]
