"""CodeRunner that runs programs in the sandbox."""

from __future__ import annotations

from functools import cached_property

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rewards.graders.code import CodeOutcome
from mcore_rl.sandbox.check import open_sandbox
from mcore_rl.sandbox.interface import Program, Sandbox


class SandboxRunner:
    """A CodeRunner that opens the sandbox with the first program, because most graders run none."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config

    @cached_property
    def _sandbox(self) -> Sandbox:
        return open_sandbox(self._config)

    def run(self, source: str, stdin: str, seconds: float) -> CodeOutcome:
        """Run a program.

        Raises: SandboxError if the program cannot be started.
        """
        outcome = self._sandbox.run(Program(source, stdin=stdin, seconds=min(seconds, self._config.seconds)))
        return CodeOutcome(outcome.stdout, outcome.ok)
