"""Calls of worker methods on all ranks of a vLLM engine: errors come back as values, answers come in time.

vLLM's executor raises at the first rank that fails and leaves the answers of the others in their queues, where the next
call takes them for its own; and it waits for ever for a rank that does not answer. So ranks return their errors, every
call has a deadline, and an engine of which an answer is missing answers nothing more.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import psutil

from mcore_rl.errors import McoreRLError, WorkerDiedError
from mcore_rl.weights.transports.shared_memory import SHARED_MEMORY

_TRACE_LINES = 12
"""Of a rank's traceback: the frame that failed and the message."""


@dataclass(frozen=True)
class Failure:
    """What a method raised on a rank: `kind` is our own error, or None for any other, whose traceback `text` ends
    with."""

    rank: int
    kind: type[McoreRLError] | None
    text: str


def unlink_queues() -> None:
    """Removes the names of the shared memory that this process has mapped for vLLM's message queues, once all who share
    it have: nothing is left then, however the processes end. Ray kills the helper of Python's that would see to it."""
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in map(Path, mapped):
        if path.parent == SHARED_MEMORY and path.name.startswith("psm_"):
            path.unlink(missing_ok=True)
            with contextlib.suppress(KeyError):
                resource_tracker.unregister(f"/{path.name}", "shared_memory")


class RankMethods:
    """Mixed into vllm's Worker; one instance per engine rank."""

    rank: int

    def unlink_queues(self) -> None:
        unlink_queues()

    def answer(self, method: str, *args: Any) -> Any:
        """The method's result, or a Failure."""
        try:
            return getattr(self, method)(*args)
        except McoreRLError as error:
            return Failure(self.rank, type(error), str(error))
        except Exception as error:
            lines = "".join(traceback.format_exception(error)).splitlines()
            return Failure(self.rank, None, "\n".join(lines[-_TRACE_LINES:]))


class EngineRanks:
    """All ranks of `engine` (vllm's LLMEngine), which messages call `name`."""

    def __init__(self, engine: Any, name: str, timeout_seconds: float, elsewhere: Sequence[str] = ()) -> None:
        """`elsewhere`: the other hosts with ranks of the engine."""
        self.timeout_seconds = timeout_seconds
        self._name = name
        self._elsewhere = elsewhere
        self._engine = engine
        self._lost: str | None = None
        self._bound_all_calls()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Results of a worker method, by rank.

        Raises: what ranks raised, if it is an error of ours; WorkerDiedError for any other, and when a rank does not
        answer in time.
        """
        with self.waiting(method):
            answers: list[Any] = self._engine.collective_rpc("answer", args=(method, *args))
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            self._raise(method, failures, len(answers))
        return answers

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around whatever makes vLLM wait for its ranks.

        Raises: WorkerDiedError when one does not answer in time, and ever after: its answer may still come, to the
        wrong call.
        """
        if self._lost is not None:
            raise WorkerDiedError(self._lost)
        try:
            yield
        except TimeoutError:
            self._lost = (
                f"{self._name}: not every rank answered `{what}` within {self.timeout_seconds:g} s "
                f"(cluster.collective_timeout_seconds): {self._states()}; see what holds them (a stopped process, a "
                "host without memory, a collective that waits for another rank), or raise that key"
            )
            raise WorkerDiedError(self._lost) from None

    def _bound_all_calls(self) -> None:
        """Gives a deadline to calls that vLLM makes without one, as for sleep and wake_up."""
        executor = self._engine.model_executor
        unbounded = executor.collective_rpc

        def collective_rpc(method: Any, timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
            return unbounded(method, self.timeout_seconds if timeout is None else timeout, *args, **kwargs)

        executor.collective_rpc = collective_rpc

    def _raise(self, method: str, failures: Sequence[Failure], num_ranks: int) -> NoReturn:
        first = failures[0]
        alike = [failure.rank for failure in failures if failure.text == first.text]
        where = self._name if num_ranks == 1 else f"{self._name}, rank {', '.join(map(str, alike))} of {num_ranks}"
        if first.kind is not None:
            raise first.kind(f"{first.text} ({where})")
        raise WorkerDiedError(f"{where} failed in `{method}`:\n{first.text}")

    def _states(self) -> str:
        workers = getattr(self._engine.model_executor, "workers", [])  # none where the only rank is this process
        here = [f"rank {worker.rank} (process {worker.proc.pid}) {_state(worker.proc.pid)}" for worker in workers]
        return ", ".join([*here, *(f"those on {host} are not seen from here" for host in self._elsewhere)])


def _state(pid: int) -> str:
    try:
        return f"is {psutil.Process(pid).status()}"
    except psutil.NoSuchProcess:
        return "is gone"
