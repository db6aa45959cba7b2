"""Sandbox of this machine: one confined process tree per program."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.limits import Limits
from mcore_rl.sandbox.confinement.start import confinement_of
from mcore_rl.sandbox.execution import execute
from mcore_rl.sandbox.interface import Outcome, Program
from mcore_rl.sandbox.interpreter import Interpreter, Shell
from mcore_rl.sandbox.languages import Language, find_language, resolve_command


class LocalSandbox:
    """Runs programs and starts interpreters and shells. Thread-safe; one instance suffices for a process.

    Raises: ConfigError on an unsupported processor architecture.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._limits = Limits.of(config)
        self._confinement = confinement_of(config)
        self._slots = threading.Semaphore(config.max_running or len(os.sched_getaffinity(0)))

    def run(self, program: Program) -> Outcome:
        """Wait for a free slot, then run the program. Its time limit starts with the run.

        Raises: SandboxError if the program could not be started: unknown language, no memory for files, no namespaces.
        """
        language = find_language(program.language)
        if not language.compile:
            return self._run(program, language)
        compilation = self._compile(program, language)
        if not compilation.ok:
            return replace(compilation, stage="compile", files={})
        if language.binary not in compilation.files:
            raise SandboxError(f"{program.language}: the compiled program is larger than sandbox.tmp_mib allows")
        return self._run(replace(program, files={**program.files, **compilation.files}), language)

    def interpreter(self) -> Interpreter:
        """Start a Python interpreter for an episode. Raises: SandboxError if it does not start."""
        return Interpreter(self._config, self._confinement, self._slots)

    def shell(self) -> Shell:
        """Start a shell for an episode. Raises: SandboxError if it does not start."""
        return Shell(self._config, self._confinement, self._slots)

    def execute(
        self,
        command: list[str],
        limits: Limits | None = None,
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: tuple[str, ...] = (),
    ) -> Outcome:
        """Run a command given by absolute paths inside the sandbox. Raises: SandboxError like run()."""
        with self._slots:
            return execute(
                self._confinement, command, limits or self._limits, stdin=stdin, files=files or {}, fetch=fetch
            )

    def _compile(self, program: Program, language: Language) -> Outcome:
        files = {**program.files, language.source: _encoded(program.code)}
        return self.execute(resolve_command(language.compile, self._config), files=files, fetch=(language.binary,))

    def _run(self, program: Program, language: Language) -> Outcome:
        return self.execute(
            resolve_command(language.run, self._config),
            self._limits.within(program.seconds, address_space=language.address_space),
            stdin=_encoded(program.stdin),
            files={**program.files, language.source: _encoded(program.code)},
            fetch=program.fetch,
        )


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # generated text can contain half of a surrogate pair
