"""Programs on this machine, each in a sandbox of its own."""

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
from mcore_rl.sandbox.languages import Language, filled, find_language


class LocalSandbox:
    """Runs programs, and opens interpreters and shells; one of them serves a whole process, from any thread.

    Raises: ConfigError where this machine's architecture is not known.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._limits = Limits.of(config)
        self._confinement = confinement_of(config)
        self._turns = threading.Semaphore(config.max_running or len(os.sched_getaffinity(0)))

    def run(self, program: Program) -> Outcome:
        """Waits for its turn; time counts from then on.

        Raises: SandboxError if it could not be run at all: an unknown language, no memory for its files, no namespaces.
        """
        language = find_language(program.language)
        if not language.compile:
            return self._run(program, language)
        compilation = self._compile(program, language)
        if not compilation.ok:
            return replace(compilation, stage="compile", files={})
        if language.binary not in compilation.files:
            raise SandboxError(f"{program.language}: what was compiled is larger than sandbox.tmp_mib allows")
        ready = replace(program, files={**program.files, **compilation.files})
        return replace(self._run(ready, language), compilation=replace(compilation, files={}))

    def interpreter(self) -> Interpreter:
        """A Python interpreter of an episode. Raises: SandboxError if it does not start."""
        return Interpreter(self._config, self._confinement, self._turns)

    def shell(self) -> Shell:
        """A shell of an episode. Raises: SandboxError if it does not start."""
        return Shell(self._config, self._confinement, self._turns)

    def execute(
        self,
        command: list[str],
        limits: Limits | None = None,
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        fetch: tuple[str, ...] = (),
    ) -> Outcome:
        """A command with full paths, as they are inside; otherwise as run()."""
        with self._turns:
            return execute(
                self._confinement, command, limits or self._limits, stdin=stdin, files=files or {}, fetch=fetch
            )

    def _compile(self, program: Program, language: Language) -> Outcome:
        limits = self._limits.within(program.compile_seconds, None)
        files = {**program.files, language.source: _encoded(program.code)}
        return self.execute(filled(language.compile, self._config), limits, files=files, fetch=(language.binary,))

    def _run(self, program: Program, language: Language) -> Outcome:
        limits = self._limits.within(program.seconds, program.memory_mib, address_space=language.address_space)
        return self.execute(
            filled(language.run, self._config),
            limits,
            stdin=_encoded(program.stdin),
            files={**program.files, language.source: _encoded(program.code)},
            fetch=program.fetch,
        )


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a model's text may have half of a surrogate pair
