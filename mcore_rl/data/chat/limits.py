"""Time and memory limits for chat templates, which come with a tokenizer and may be malicious or broken.

Jinja's sandbox stops neither `{{ 'a' * 10**10 }}` nor two nested loops of 100,000 iterations. Templates therefore run
in a forked child process that the parent can kill: once when the template is loaded, and for every block of rows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.parent_death import die_with
from mcore_rl.processes.exits import exit_text

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
            # The limit applies to each job, because the child sends a result before it starts the next job.
            if not connection.poll(MAX_SECONDS):
                raise TemplateLimitError(f"did not end within {MAX_SECONDS:g} seconds", number)
            try:
                result = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                child.join(1)
                raise TemplateLimitError(f"ended its process ({exit_text(child.exitcode)})", number) from None
            if isinstance(result, TemplateLimitError):
                result.job = number
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


@contextlib.contextmanager
def _child(jobs: Sequence[Callable[[], T]]) -> Iterator[tuple[Connection, BaseProcess]]:
    # A fork, because the jobs refer to a loaded tokenizer, which a new process would have to load again.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(jobs, receiver, sender, os.getpid()), daemon=True)
    child.start()
    sender.close()
    try:
        yield receiver, child
    finally:
        receiver.close()
        child.kill()
        child.join()


def _serve(jobs: Sequence[Callable[[], T]], receiver: Connection, sender: Connection, parent: int) -> None:
    """Send the pickled result of each job, up to the first one that fails or exceeds a limit."""
    # The child inherits both ends of the pipe; with its own receiver open, a send would never fail.
    receiver.close()
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Relative to the current size: the child starts with all mappings of the parent.
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))
    for job in jobs:
        error: McoreRLError
        try:
            message = pickle.dumps(job())
            if len(message) > MAX_RESULT_BYTES:
                raise TemplateLimitError(f"writes more than {MAX_RESULT_BYTES >> 20} MiB of text")
        except MemoryError:
            error = TemplateLimitError(f"needs more than {MAX_BYTES >> 20} MiB of memory")
        except McoreRLError as raised:
            error = raised
        else:
            sender.send_bytes(message)
            continue
        sender.send_bytes(pickle.dumps(error))
        return
