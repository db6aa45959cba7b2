"""Time and memory limits for chat templates, which come with a tokenizer and may be malicious or broken.

Jinja's sandbox stops neither `{{ 'a' * 10**10 }}` nor two nested loops of 100,000 iterations. Templates therefore run
in a forked child process that the parent can kill: once when the template is loaded, and for every block of rows.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.parent_death import die_with

MAX_SECONDS = 30.0
"""Time limit of one rendering; normal templates take milliseconds."""
MAX_BYTES = 2 << 30
"""Address space that a child may allocate in addition to the parent's."""
MAX_RESULT_BYTES = 1 << 26
"""Maximum size of one rendered text."""

T = TypeVar("T")


class TemplateLimitError(ConfigError):
    """A chat template exceeded a limit; `job` is the index of the rendering."""

    def __init__(self, problem: str, job: int = 0) -> None:
        super().__init__(problem)
        self.job = job


def render_all(jobs: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Run jobs that render chat templates in a child process under the limits, and yield their results.

    Raises: the error of the first job that fails, if it is a McoreRLError; TemplateLimitError.
    """
    with _child(jobs) as (connection, child):
        for number in range(len(jobs)):
            if not connection.poll(MAX_SECONDS):
                raise TemplateLimitError(f"did not end within {MAX_SECONDS:g} seconds", number)
            try:
                result = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                raise TemplateLimitError(f"ended its process ({_status(child)})", number) from None
            if isinstance(result, _Exceeded):
                raise TemplateLimitError(result.problem, number)
            if isinstance(result, BaseException):
                raise result
            yield result


def check_limits(work: Callable[[], object], key: str, remedy: str = "data.template=plain, or ") -> None:
    """Run `work`, which renders a chat template, once in a child process under the limits.

    The result and McoreRLErrors are ignored: the caller runs `work` again in its own process.

    Raises: ConfigError if a limit is exceeded; `key` is the configuration key of the tokenizer.
    """

    def job() -> None:
        with contextlib.suppress(McoreRLError):
            work()

    try:
        list(render_all([job]))
    except TemplateLimitError as error:
        raise ConfigError(
            f"{key}: the tokenizer's chat template {error}; set {remedy}{key} to a directory whose tokenizer has "
            "another chat template"
        ) from None


class _Exceeded:
    def __init__(self, problem: str) -> None:
        self.problem = problem


@contextlib.contextmanager
def _child(jobs: Sequence[Callable[[], T]]) -> Iterator[tuple[Connection, int]]:
    receiver, sender = Pipe(duplex=False)
    parent = os.getpid()
    # A fork, because the jobs refer to a loaded tokenizer, which a new process would have to load again.
    child = os.fork()
    if child == 0:
        try:
            receiver.close()
            _serve(jobs, sender, parent)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # skip the exit handlers inherited from the parent
    sender.close()
    try:
        yield receiver, child
    finally:
        receiver.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _serve(jobs: Sequence[Callable[[], T]], connection: Connection, parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))
    for job in jobs:
        message, goes_on = _message(job)
        connection.send_bytes(message)
        if not goes_on:
            return


def _message(job: Callable[[], T]) -> tuple[bytes, bool]:
    """Run a job. Returns its pickled result, error or exceeded limit, and whether the next job may run."""
    try:
        message = pickle.dumps(job())
    except MemoryError:
        return pickle.dumps(_Exceeded(f"needs more than {MAX_BYTES >> 20} MiB of memory")), False
    except McoreRLError as error:
        return pickle.dumps(error), False
    if len(message) > MAX_RESULT_BYTES:
        return pickle.dumps(_Exceeded(f"writes more than {MAX_RESULT_BYTES >> 20} MiB of text")), False
    return message, True


def _status(child: int) -> str:
    """Return the child's exit code or signal. WNOWAIT keeps the zombie: its pid must not be reused before the kill."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return f"{'exit code' if ended.si_code == os.CLD_EXITED else 'signal'} {ended.si_status}"
        time.sleep(0.01)
    return "no exit status"
