"""Sandbox on this machine: each program runs in its own confined process tree."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.commands import MIB, RunLimits, confinement_of, in_memory
from mcore_rl.sandbox.confinement.start import KILLED, Budget, Confined
from mcore_rl.sandbox.interface import Outcome, Program
from mcore_rl.sandbox.interpreter import PYTHON, Interpreter, Shell
from mcore_rl.sandbox.parcels import READY, RUN, check_path, pack, unpack

SEARCH_PATH = "/usr/local/bin:/usr/bin"
"""Directories of programs that are visible inside bubblewrap."""


@dataclass(frozen=True)
class Language:
    """Programming language. PYTHON in a command stands for sandbox.python.

    source: file name of the code.
    run: command that runs the program.
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
    "pytest": Language("test_main.py", (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_main.py")),
    "python": Language("main.py", (PYTHON, "-u", "main.py")),
    "ruby": Language("main.rb", ("ruby", "main.rb")),
}


def find_language(name: str) -> Language:
    """Return an installed language. Raises: SandboxError if it is unknown or not installed."""
    if name not in LANGUAGES:
        raise SandboxError(f"language {name} is not known here, only {', '.join(LANGUAGES)}")
    language = LANGUAGES[name]
    program = (language.compile or language.run)[0]
    if program != PYTHON and shutil.which(program, path=SEARCH_PATH) is None:
        raise SandboxError(f"language {name}: {program} is not installed on this machine")
    return language


def resolve_command(command: tuple[str, ...], config: SandboxConfig) -> list[str]:
    """Replace the program of a command with its absolute path inside the sandbox."""
    python = os.path.abspath(config.python)
    program = python if command[0] == PYTHON else shutil.which(command[0], path=SEARCH_PATH) or command[0]
    return [program, *command[1:]]


class LocalSandbox:
    """Runs programs and starts interpreters and shells. Thread-safe; one instance suffices for a process.

    Raises: ConfigError on an unsupported processor architecture.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._limits = RunLimits(**vars(config))
        self._confinement = confinement_of(config)
        # Slots are shared by programs and cells; an interpreter without a running cell holds none.
        self._slots = threading.Semaphore(config.max_running or len(os.sched_getaffinity(0)))

    def run(self, program: Program) -> Outcome:
        """Wait for a free slot, then run the program. Its time limit starts with the run.

        Raises: SandboxError if the program could not be started: unknown language, no memory for files, no namespaces.
        """
        language = find_language(program.language)
        files = {**program.files, language.source: _encoded(program.code)}
        if language.compile:
            command = resolve_command(language.compile, self._config)
            compilation = self.execute(command, files=files, fetch=(language.binary,))
            if not compilation.ok:
                # Drop `files`: a failed compiler may leave a partial binary.
                return replace(compilation, stage="compile", files={})
            if language.binary not in compilation.files:
                raise SandboxError(f"{program.language}: the compiled program is larger than sandbox.tmp_mib allows")
            files |= compilation.files
        seconds = self._limits.seconds if program.seconds is None else min(self._limits.seconds, program.seconds)
        limits = replace(self._limits, seconds=seconds, address_space=language.address_space)
        command, stdin = resolve_command(language.run, self._config), _encoded(program.stdin)
        return self.execute(command, limits, stdin=stdin, files=files, fetch=program.fetch)

    def interpreter(self) -> Interpreter:
        """Start a Python interpreter for an episode. Raises: SandboxError if it does not start."""
        return Interpreter(self._config, self._confinement, self._slots)

    def shell(self) -> Shell:
        """Start a shell for an episode. Raises: SandboxError if it does not start."""
        return Shell(self._config, self._confinement, self._slots)

    def execute(
        self,
        command: list[str],
        limits: RunLimits | None = None,
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: tuple[str, ...] = (),
        stopped: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Run a command given by absolute paths inside the sandbox. It is killed soon after `stopped` returns True.

        Raises: SandboxError like run().
        """
        limits = limits or self._limits
        with self._slots:
            confined = self._started(command, limits, files or {}, fetch)
            started, output = time.monotonic(), Budget(limits.output_kib << 10)
            try:
                confined.send(stdin, close=True)
                stdout = confined.receive(confined.process.stdout, output)
                stderr = confined.receive(confined.process.stderr, output)
                packed = confined.receive(confined.results, Budget((limits.tmp_mib + 1) * MIB))
                why = confined.until(stopped, limits.seconds)
                left = limits.seconds - (time.monotonic() - started)
                if stopped() or (why == "exit" and not confined.wait(max(0.0, left))):
                    why = "timeout"
                if confined.memory_exceeded():
                    why = "memory"
            finally:
                code = confined.end()
            message = stderr.decode("utf-8", "replace")
            if why == "exit" and not packed.startswith(READY):
                raise SandboxError(f"the sandbox did not start: {message.strip() or f'it ended with code {code}'}")
            fetched = unpack(bytes(packed[len(READY) :]), fetch) if why == "exit" else {}
            return_code, seconds = code if why == "exit" else KILLED, time.monotonic() - started
            return Outcome(why, return_code, stdout.decode("utf-8", "replace"), message, seconds, fetched)

    def _started(
        self, command: list[str], limits: RunLimits, files: Mapping[str, bytes], fetch: tuple[str, ...]
    ) -> Confined:
        """Start a command whose `results` are the fetched files."""
        names = [check_path(name) for name in fetch]
        parcel = in_memory("files", pack(files))
        before, after = ["/bin/bash", "-c", RUN, "sandbox", str(parcel)], [str(len(names)), *names, *command]
        try:
            return Confined(
                self._confinement, lambda results: [*before, str(results), *after], limits, inherited=(parcel,)
            )
        finally:
            os.close(parcel)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # generated text can contain half of a surrogate pair
