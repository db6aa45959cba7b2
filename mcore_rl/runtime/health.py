"""Waits that cannot hang on a dead process: every wait also watches all processes of the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from mcore_rl.errors import ClusterDiedError, McoreRLError, PeerLostError, WorkerDiedError, storage_error
from mcore_rl.runtime.calls import ProcessHandle, Ref, unpacked
from mcore_rl.runtime.daemons import Daemons
from mcore_rl.runtime.roles.base import RunProcess
from mcore_rl.runtime.roles.origins import first_line, last_lines, named, origin_of
from mcore_rl.runtime.roles.places import Places
from mcore_rl.runtime.stack_dumps import StackRequests, dump_stacks, files_of
from mcore_rl.runtime.stops import STOPS

if TYPE_CHECKING:
    from mcore_rl.runtime.delivery import Chunk

# After a rank dies, its peers fail in their collectives, often before the death itself is reported: an unexplained
# failure waits this long for a death that explains it.
SECONDS_FOR_A_DEATH_TO_SHOW = 5.0
SECONDS_FOR_PENDING = 2.0  # for living processes to return their pending collectives, for the message of a failure
# Interval at which a wait checks whether any process has died, including processes whose results it does not need.
SECONDS_BETWEEN_LOOKS = 0.5
# With many calls, a wait returns after one in PART_OF_CALLS has ended, or after SECONDS_TO_GATHER.
PART_OF_CALLS = 16
SECONDS_TO_GATHER = 0.05
PROBES_PER_TIMEOUT = 10  # liveness probes within the timeout of a silent process
# Detection of a silent process takes the timeout, the interval of the probes, and a few checks. Processes that wait for
# a replaceable process get more time, so that it is replaced before they give up.
PART_FOR_DEPENDENTS = 1.25
SECONDS_FOR_DEPENDENTS = 10.0
# Maximum number of processes whose host and log file one message names.
MAX_PLACES = 4

T = TypeVar("T")
AnyRef = Ref[object]
AnyProcess = ProcessHandle[RunProcess]
Starts = dict[AnyRef, Sequence[AnyProcess]]
"""Set-ups in progress: reference that is ready when a set-up ends -> the processes that take part in it."""


class Attendant(Protocol):
    """Scheduler of the engines: results of its calls are processed while the driver waits for other calls."""

    def calls(self) -> list[AnyRef]:
        """Return the calls that have not ended."""

    def ended(self, calls: Sequence[AnyRef]) -> None:
        """Process the results of calls that have ended, without waiting for anything.

        Raises: errors that end the run.
        """

    def renew(self, chunks: Sequence[Chunk]) -> bool:
        """Regenerate trajectories that were lost with their engine; return whether there were any."""


@dataclass
class Watch:
    """The processes of a run, each with a call that ends only with the process, and the Ray daemons under them."""

    daemons: Daemons = field(default_factory=Daemons)
    timeout_seconds: float = 600.0
    """Time after which a process without an answer counts as lost."""
    start_seconds: float = 1800.0
    """Time limit of a process's start."""
    places: Places = field(default_factory=Places)
    stacks: StackRequests = field(default_factory=StackRequests)
    """Requests for stack dumps of all processes."""
    attendant: Attendant | None = None
    """Receives its ended calls in every wait of this process."""
    processes: dict[object, AnyProcess] = field(default_factory=dict, init=False)
    """All processes by Ray's id."""
    _polls: list[Callable[[], None]] = field(default_factory=list, init=False)
    """Functions of `polling`."""
    _ends: dict[AnyRef, AnyProcess] = field(default_factory=dict, init=False)
    """Calls that end only with their process."""
    _replaceable: set[AnyProcess] = field(default_factory=set, init=False)
    """Processes whose death does not end the run."""
    lost: dict[AnyProcess, str] = field(default_factory=dict, init=False)
    """Reason of the loss of each replaceable process that is lost."""
    _looked: float = field(default_factory=time.monotonic, init=False)
    """Time of the last look at all processes."""
    _probes: dict[Ref[float], AnyProcess] = field(default_factory=dict, init=False)
    """Liveness probes that have not ended."""
    _answered: set[AnyProcess] = field(default_factory=set, init=False)
    """Processes that have started or answered a probe. A process that is still starting does not count as silent."""
    _waited: float = field(default=0.0, init=False)
    """Seconds since the last probes. A longer pause between two checks, such as while this process was stopped, counts
    as 2 * SECONDS_BETWEEN_LOOKS: other processes may have been stopped too."""

    @property
    def dependent_seconds(self) -> float:
        """Timeout of processes that wait for a replaceable process: longer than the detection of its silence."""
        return PART_FOR_DEPENDENTS * self.timeout_seconds + SECONDS_FOR_DEPENDENTS

    def add(self, process: AnyProcess) -> None:
        """Watch a process."""
        self.add_call(process, process.call(RunProcess.watch))
        self.processes[process.actor_id] = process

    def allow_failure(self, processes: Iterable[AnyProcess]) -> None:
        """Do not end the run when one of these processes dies: `lost` has the reason, and `replace` replaces it."""
        self._replaceable.update(processes)

    def replace(self, process: AnyProcess, other: AnyProcess) -> None:
        """Watch `other` under the name of `process`, a replaceable process that is dead or being killed."""
        self._lose(process, "")
        del self.lost[process], self.processes[process.actor_id]
        self._replaceable.discard(process)
        self.places.forget(process)
        other.name = process.name
        self.allow_failure([other])
        self.add(other)

    def add_call(self, process: AnyProcess, call: AnyRef) -> None:
        """Watch a call that ends only when the process can do no more work for the run."""
        self._ends[call] = process

    @contextlib.contextmanager
    def polling(self, poll: Callable[[], None]) -> Iterator[None]:
        """Call `poll` in the waits of the block, at every look at all processes. It must not wait."""
        self._polls.append(poll)
        try:
            yield
        finally:
            self._polls.remove(poll)

    def get(self, refs: Sequence[Ref[T]], needs: Sequence[AnyProcess] = ()) -> list[T]:
        """Wait for the results of `refs` and return them in order. `needs` are other processes on which the results
        depend.

        Raises: the typed error of a process, with the process in its message; WorkerDiedError naming a process that
        died or failed, as soon as that happens (a replaceable process only if `refs` are its calls or it is one of
        `needs`); ClusterDiedError if Ray's daemons died; KeyboardInterrupt instead of the latter two if a stop was
        requested, because the signal may have reached all processes.
        """
        pending, results = list(dict.fromkeys(refs)), dict[Ref[T], T]()
        with self._explained():
            while pending:
                # Wait for all together: waiting for one at a time would pass every reference to Ray once per result.
                ready, pending = self.wait(pending, len(pending))
                for ref in ready:
                    results[ref] = self.value(ref)
                if pending:
                    self._require_present(pending, needs)
        return [results[ref] for ref in refs]

    def get_started(self, starts: Starts) -> None:
        """Wait until set-ups have ended, each with the processes that take part in it.

        Raises: as `get`, also for replaceable processes; WorkerDiedError with the names of processes that are not ready
        within `start_seconds`.
        """
        pending, deadline = list(starts), self.start_deadline()
        with self._explained():
            while pending:
                ready, pending = self.wait(pending, len(pending))
                for ref in ready:
                    self.value(ref)
                    # From now on a missing answer counts as silence. During the set-up it does not: loading a model
                    # blocks a process for minutes.
                    self._answered.update(starts[ref])
                self._require_in_time([process for ref in pending for process in starts[ref]], deadline)

    def start_deadline(self) -> float:
        """Return the time limit, by time.monotonic(), of a process that starts now."""
        return time.monotonic() + self.start_seconds

    def has_started(self, start: AnyRef, processes: Sequence[AnyProcess], deadline: float) -> bool:
        """Return whether a set-up has ended, without waiting for it.

        Raises: as `get_started`, after the deadline.
        """
        ended, _ = ray.wait([start], timeout=0)
        with self._explained():
            if ended:
                self.value(start)
                self._answered.update(processes)
            else:
                self._require_in_time(processes, deadline)
        return bool(ended)

    def _require_in_time(self, processes: Sequence[AnyProcess], deadline: float) -> None:
        if processes and time.monotonic() > deadline:
            self._give_up_stalled(
                processes,
                f"did not start within {self.start_seconds:g} s (cluster.start_timeout_seconds): see the end "
                "of its log, or raise that key",
            )
        self._require_alive(processes)  # other processes of the engine may wait forever for a lost one

    def _require_alive(self, processes: Iterable[AnyProcess]) -> None:
        for process in processes:
            if process in self.lost:
                raise WorkerDiedError(self.lost[process])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the pending collectives of other processes to an error, or turn it into a requested stop."""
        try:
            yield
        except ClusterDiedError:
            STOPS.end()
            raise
        except WorkerDiedError as error:
            STOPS.end()
            raise WorkerDiedError("\n".join([str(error), *self._pending_work()])) from None

    def _require_present(self, pending: Sequence[AnyRef], needs: Sequence[AnyProcess]) -> None:
        """Check the processes whose results are pending: the calls of a stopped process never end.

        Raises: WorkerDiedError if one of them, or of `needs`, is lost.
        """
        if any(process.actor_id not in self.processes for process in needs):
            raise WorkerDiedError("a process that was needed has been replaced")
        if self.lost:
            owing = [process for ref in pending if (process := self._called(ref)) is not None]
            self._require_alive([*needs, *owing])

    def wait(self, refs: Sequence[Ref[T]], num_returns: int) -> tuple[list[Ref[T]], list[Ref[T]]]:
        """Wait until `num_returns` of `refs` have ended, at most SECONDS_BETWEEN_LOOKS. Returns the ended ones and the
        others.

        Raises: as `get`, for the deaths of processes; errors of `refs` themselves are raised by `value`.
        """
        STOPS.raise_swallowed()
        if (name := self.daemons.dead()) is not None:
            raise ClusterDiedError(f"Ray's {name} died, and with it every process of the run")
        ready, pending = self._ended(refs, num_returns)
        # A wait whose results are all there returns at once. Waits without references are the driver's idle time, which
        # always looks.
        if self._ends and (pending or not refs) and time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            elapsed, self._looked = time.monotonic() - self._looked, time.monotonic()
            self.places.update()
            if self.stacks.take():
                self._dump_stacks()
            dead, _ = ray.wait(list(self._ends), num_returns=1, timeout=0)
            if dead:
                self._report_death(dead[0])
            self._probe(min(elapsed, 2 * SECONDS_BETWEEN_LOOKS))
            for poll in self._polls:
                poll()
        return ready, pending

    def _ended(self, refs: Sequence[Ref[T]], num_returns: int) -> tuple[list[Ref[T]], list[Ref[T]]]:
        """Implement `wait`. The attendant receives its own ended calls; then fewer than `num_returns` may return."""
        own = self.attendant.calls() if self.attendant is not None else []
        if self.attendant is None or not own:
            ready, pending = ray.wait(
                list(refs), num_returns=num_returns, timeout=SECONDS_BETWEEN_LOOKS, fetch_local=False
            )
            return ready, pending
        every = [*refs, *own]
        # ray.wait takes time in proportion to the number of calls, so gather several results per wait.
        enough = max(1, len(own) // PART_OF_CALLS)
        seconds = SECONDS_BETWEEN_LOOKS if enough == 1 else SECONDS_TO_GATHER
        ended, _ = ray.wait(every, num_returns=enough, timeout=seconds, fetch_local=False)
        if ended and len(ended) < len(every):  # include those that have ended meanwhile
            ended, _ = ray.wait(every, num_returns=len(every), timeout=0, fetch_local=False)
        there = set(ended)
        if of_attendant := [call for call in own if call in there]:
            self.attendant.ended(of_attendant)
        return [ref for ref in refs if ref in there], [ref for ref in refs if ref not in there]

    def _probe(self, seconds: float) -> None:
        """Evaluate liveness probes and send new ones, `seconds` after the last call. Probes detect a process that is
        stopped (SIGSTOP) or hangs: it is not dead, and there may be no collective that would time out.

        Raises: WorkerDiedError if a process has not answered, or its work has hung, for `timeout_seconds`.
        """
        self._waited += seconds
        answered, silent = (
            ray.wait(list(self._probes), num_returns=len(self._probes), timeout=0) if self._probes else ([], [])
        )
        self._answered |= {self._probes[call] for call in answered}
        silent_processes = [self._probes[call] for call in silent if self._probes[call] in self._answered]
        self._require_moving({self._probes.pop(call): call for call in answered})
        if silent_processes and self._waited > self.timeout_seconds:
            self._give_up_stalled(silent_processes, f"did not answer for {self.timeout_seconds:g} s")
        # New probes only while no process is silent, so that `_waited` measures the silence.
        if not silent_processes and self._waited > self.timeout_seconds / PROBES_PER_TIMEOUT:
            self._probes = {process.call(RunProcess.seconds_stuck): process for process in self.processes.values()}
            self._waited = 0.0

    def _require_moving(self, answers: dict[AnyProcess, Ref[float]]) -> None:
        for process, call in answers.items():
            with contextlib.suppress(RayError):  # the process is dead
                if (seconds := ray.get(call)) > self.timeout_seconds:
                    self._give_up_stalled([process], f"has hung for {seconds:.0f} s in one call")

    def _give_up_stalled(self, processes: Sequence[AnyProcess], why: str) -> None:
        """Give up processes that make no progress, after a stack dump of all processes. Raises: as `_give_up`."""
        self._give_up(processes, f"{why}{self._dump_stacks()}")

    def _dump_stacks(self) -> str:
        """Make all living processes write their stacks. Return a note with their files; "" if no process is known."""
        living = [process for process in self.processes.values() if process not in self.lost]
        is_dumped = dump_stacks(self.places.members(living), set(self._probes.values()))
        return f"; stacks of all processes: {files_of(self.places.logs)}" if is_dumped and self.places.logs else ""

    def _give_up(self, processes: Sequence[AnyProcess], why: str) -> None:
        """Mark processes as lost. Raises: WorkerDiedError unless all of them can be replaced."""
        if not self._replaceable.issuperset(processes):
            names = ", ".join(process.name for process in processes)
            raise WorkerDiedError(f"{names} {why}{self.places.described(processes[:MAX_PLACES])}")
        for process in processes:
            self._lose(process, f"{process.name} {why}{self.places.described([process])}")

    def _lose(self, process: AnyProcess, why: str) -> None:
        self._ends = {ref: other for ref, other in self._ends.items() if other is not process}
        self._probes = {call: other for call, other in self._probes.items() if other is not process}
        self._answered.discard(process)
        self.lost[process] = why

    def value(self, ref: Ref[T]) -> T:
        """Return the result of a call that has ended.

        Raises: as `get`; also WorkerDiedError if a replaceable process has died.
        """
        try:
            return cast(T, unpacked(ray.get(ref)))
        except RayTaskError as error:
            cause = error.cause
            # A rank that waited for a dead peer reports only a timeout. The death itself is the better explanation.
            if isinstance(cause, PeerLostError):
                self.blame_the_dead()
            # A full disk, for example, becomes an error that names the key of the path.
            if isinstance(cause, OSError):
                cause = storage_error(cause) or cause
            process = self._called(ref)
            origin = origin_of(error.cause) or (None if process is None else process.name)
            if isinstance(cause, McoreRLError):
                raise named(cause, origin) from None
            self.blame_the_dead()
            raise WorkerDiedError(f"{origin or 'a process'} failed: {last_lines(error)}") from None
        except RayError as error:
            self.blame_the_dead()
            process = self._called(ref)
            if process is None:
                raise WorkerDiedError(f"a process died: {first_line(error)}") from None
            how = self.places.death(process, error)
            raise WorkerDiedError(f"{process.name} died: {how}{self.places.described([process])}") from None

    def _called(self, ref: AnyRef) -> AnyProcess | None:
        """Return the process that was called; None if it is not a process of this run."""
        if not hasattr(ref, "task_id"):
            return None
        return self.processes.get(ref.task_id().actor_id())

    def _pending_work(self) -> list[str]:
        """Return lines about the pending collectives of living processes, and about processes that do not answer."""
        living = [process for process in self.processes.values() if process not in self.lost]
        calls = {process.call(RunProcess.pending_collectives): process.name for process in living}
        if not calls:
            return []
        answered, silent = ray.wait(list(calls), num_returns=len(calls), timeout=SECONDS_FOR_PENDING)
        lines = []
        for call in answered:
            with contextlib.suppress(RayError):  # the process is dead
                lines += [f"{calls[call]} waits in {collective}" for collective in ray.get(call)]
        return lines + [f"{calls[call]} does not answer" for call in silent]

    def blame_the_dead(self, processes: Sequence[AnyProcess] = ()) -> None:
        """Wait a few seconds for a death that explains a failure: of any process, or only of `processes`.

        Raises: WorkerDiedError with the name of the dead process, unless it can be replaced.
        """
        suspects = set(processes or self.processes.values())
        if not suspects.isdisjoint(self.lost):  # a known loss explains the failure
            return
        refs = [ref for ref, process in self._ends.items() if process in suspects]
        ready, _ = ray.wait(refs, num_returns=1, timeout=SECONDS_FOR_A_DEATH_TO_SHOW)
        if ready:
            self._report_death(ready[0])

    def _report_death(self, ref: AnyRef) -> None:
        """Mark the process of a `watch` call that has ended as lost. Raises: WorkerDiedError unless it can be
        replaced."""
        process = self._ends[ref]
        try:
            ray.get(ref, timeout=1)
        except (RayActorError, OutOfMemoryError) as error:
            why = f"died: {self.places.death(process, error)}"
        except RayTaskError as error:
            why = f"stopped: {error.cause if isinstance(error.cause, McoreRLError) else first_line(error)}"
        except (RayError, GetTimeoutError) as error:
            why = f"stopped: {first_line(error)}"
        else:
            why = "ended: see its log in run.dir/logs"
        self._give_up([process], why)
