"""Start of a command in a sandbox, and termination of its process tree."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.commands import Confinement
from mcore_rl.sandbox.confinement.limits import MIB, RunLimits
from mcore_rl.sandbox.confinement.memory import limit_memory

KILLED = 128 + signal.SIGKILL
"""Return code of a run that exceeded a limit."""
_END_SECONDS = 10.0
"""Time limit until a killed sandbox has ended."""


class Confined:
    """Command running in a sandbox, connected by pipes. The caller must always call end().

    inherited: descriptors that the command inherits under the same numbers.
    one_output: merge stderr into stdout.

    Raises: SandboxError if it cannot be started.
    """

    def __init__(
        self,
        confinement: Confinement,
        inside: list[str],
        limits: RunLimits,
        *,
        inherited: Sequence[int] = (),
        one_output: bool = False,
    ) -> None:
        self._confinement = confinement
        self._memory = limit_memory(limits.memory_mib * MIB)
        try:
            self.process = self._start(inside, limits, inherited, subprocess.STDOUT if one_output else subprocess.PIPE)
        except BaseException:
            self._memory.close()
            raise

    def _start(
        self, inside: list[str], limits: RunLimits, inherited: Sequence[int], stderr: int
    ) -> subprocess.Popen[bytes]:
        command, descriptors = self._confinement.command(inside, limits)
        try:
            # PR_SET_PDEATHSIG fires when the starting thread ends, so a permanent thread starts all sandboxes.
            started = _starter().submit(
                subprocess.Popen,
                [*self._memory.prefix, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=(*inherited, *descriptors),
                # The process group is killed as a whole, and Ctrl-C does not reach the sandbox.
                start_new_session=True,
                # Code inside can read the environment of process 1 of its namespace.
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                cwd="/",
            )
            return started.result()
        except OSError as error:
            raise SandboxError(f"the sandbox did not start: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def memory_exceeded(self) -> bool:
        """Return whether all processes together exceed or exceeded their memory limit."""
        return self._memory.exceeded(self.process.pid)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`. Returns whether the command has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def kill(self) -> None:
        """Kill the command. Readers of its pipes then see the end of the stream."""
        if self.process.poll() is None:
            self._confinement.stop(self.process)

    def end(self) -> int:
        """Kill remaining processes and release resources. Returns the exit code, 128 + N after signal N."""
        self.kill()
        try:
            self.process.wait(_END_SECONDS)
        finally:
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            self._memory.close()
        code = self.process.returncode
        return 128 - code if code < 0 else code


@cache
def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts sandboxes; it lives as long as this process."""
    return ThreadPoolExecutor(1, thread_name_prefix="sandbox")


# A forked child has no copy of the thread, so it must start its own.
os.register_at_fork(after_in_child=_starter.cache_clear)
