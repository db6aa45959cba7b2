"""Calls of worker methods on all ranks of a vLLM engine, with errors as values and with deadlines.

vLLM's executor raises at the first rank that fails and leaves the answers of the others in their queues, where the next
call takes them for its own. It also waits forever for a rank that does not answer. Therefore ranks return their errors,
every call has a deadline, and after a missing answer every later call fails.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from mcore_rl.errors import WorkerDiedError
from mcore_rl.processes import served
from mcore_rl.processes.stacks import write_child_stacks
from mcore_rl.weights.transports.segments import SHARED_MEMORY

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def unlink_queues() -> None:
    """Remove the names of the shared memory of vLLM's message queues, after all ranks have mapped it.

    Nothing remains in /dev/shm then, however the processes end. Python's resource tracker would remove it, but Ray
    kills that process.
    """
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in map(Path, mapped):
        # psm_ is the prefix of multiprocessing.shared_memory, which vLLM's message queues use.
        if path.parent == SHARED_MEMORY and path.name.startswith("psm_"):
            path.unlink(missing_ok=True)
            with contextlib.suppress(KeyError):
                resource_tracker.unregister(f"/{path.name}", "shared_memory")


class RankMethods:
    """Mixin for vLLM's Worker; one instance per engine rank."""

    rank: int

    def unlink_queues(self) -> None:
        unlink_queues()

    def write_stacks(self, engine_pid: int) -> None:
        """Write stacks on request (processes.stacks), if this rank is not a thread of the engine's process."""
        if os.getpid() != engine_pid:
            write_child_stacks()

    def answer(self, method: str, *args: object) -> tuple[str, object]:
        """Call a method. Returns its outcome."""
        return served.outcome(lambda: getattr(self, method)(*args))


class EngineRanks:
    """Calls all ranks of `engine`. `name`: the engine's name, for messages."""

    def __init__(self, engine: LLMEngine, name: str, timeout_seconds: float, elsewhere: Sequence[str] = ()) -> None:
        """`elsewhere`: names of the other hosts with ranks of the engine."""
        self.timeout_seconds = timeout_seconds
        self._name = name
        self._elsewhere = elsewhere
        self._engine = engine
        self._lost: str | None = None
        self._bound_all_calls()

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a worker method on all ranks. Returns the results by rank.

        Raises: a rank's McoreRLError; WorkerDiedError for any other exception, and if a rank does not answer in time.
        """
        with self.waiting(method):
            answers: list[Any] = self._engine.collective_rpc("answer", args=(method, *args))
        failures = {rank: answer for rank, answer in enumerate(answers) if answer[0] != served.OK}
        if failures:
            self._raise(method, failures, len(answers))
        return [result for _, result in answers]

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Return a context of a call in which vLLM waits for its ranks.

        Raises: WorkerDiedError if a rank does not answer in time, and in every later call: the late answer would be
        taken for the answer to another call.
        """
        if self._lost is not None:
            raise WorkerDiedError(self._lost)
        try:
            yield
        except TimeoutError:
            self._lost = (
                f"{self._name}: not every rank answered `{what}` within {self.timeout_seconds:g} s "
                f"(cluster.collective_timeout_seconds): {self._states()}; find out what blocks them (a stopped "
                "process, a host without memory, a collective that waits for another rank), or raise that key"
            )
            raise WorkerDiedError(self._lost) from None

    def _bound_all_calls(self) -> None:
        """Add a deadline to calls that vLLM makes without one, for example sleep and wake_up."""
        executor = self._engine.model_executor
        unbounded = executor.collective_rpc

        def collective_rpc(method: str, timeout: float | None = None, *args: object, **kwargs: object) -> object:
            return unbounded(method, self.timeout_seconds if timeout is None else timeout, *args, **kwargs)

        executor.collective_rpc = collective_rpc

    def _raise(self, method: str, failures: Mapping[int, tuple[str, Any]], num_ranks: int) -> NoReturn:
        first = next(iter(failures.values()))
        alike = [rank for rank, failure in failures.items() if failure == first]
        where = self._name if num_ranks == 1 else f"{self._name}, rank {', '.join(map(str, alike))} of {num_ranks}"
        kind, content = first
        if kind == served.REFUSED:
            error, text = content
            raise error(f"{text} ({where})")
        raise WorkerDiedError(f"{where} failed in `{method}`:\n{content}")

    def _states(self) -> str:
        workers = getattr(self._engine.model_executor, "workers", [])  # empty if the only rank is this process
        here = [f"rank {worker.rank} (process {worker.proc.pid}) {_state(worker.proc.pid)}" for worker in workers]
        return ", ".join([*here, *(f"the state of those on {host} is unknown here" for host in self._elsewhere)])


def _state(pid: int) -> str:
    try:
        return f"is {psutil.Process(pid).status()}"
    except psutil.NoSuchProcess:
        return "is gone"
