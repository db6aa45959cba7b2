"""Waiting that cannot hang on a dead process: every wait also watches the life of every process of the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from mcore_rl.errors import ClusterDiedError, McoreRLError, PeerLostError, WorkerDiedError, storage_error
from mcore_rl.runtime.daemons import Daemons, pid_is_alive
from mcore_rl.runtime.roles.origins import first_line, last_lines, named, origin_of
from mcore_rl.runtime.roles.places import Places
from mcore_rl.runtime.stops import STOPS
from mcore_rl.weights.transports.hosts import this_host

# After a rank dies its peers fail in their collectives, often before the death itself is reported: an unexplained
# failure waits this long for a death to explain it.
SECONDS_FOR_A_DEATH_TO_SHOW = 5.0
# Processes that still run have so long to say what they wait in.
SECONDS_TO_SAY = 2.0
# While results are awaited, deaths of processes that owe none are looked for this often.
SECONDS_BETWEEN_LOOKS = 0.5
# Of an attendant's calls, one in so many is waited for, but not longer than this.
PART_OF_CALLS = 16
SECONDS_TO_GATHER = 0.05
# Of the time that a silent process has, this much passes between two questions whether it still runs.
QUESTIONS_PER_TIMEOUT = 10
# Detection of a silent process takes its timeout, the time between two questions, and a few looks. Processes that wait
# for a replaceable one get more, so that it is replaced before they give up.
PART_FOR_DEPENDENTS = 1.25
SECONDS_FOR_DEPENDENTS = 10.0


class Attendant(Protocol):
    """Has calls of its own under way, which end while others are waited for."""

    def calls(self) -> list[Any]: ...

    def ended(self, calls: Sequence[Any]) -> None:
        """Of these it takes the values; it must not wait for anything.

        Raises: what ends the run.
        """


@dataclass
class Watch:
    """The processes of a run and, for each, a call that ends only when the process does; and the Ray under them."""

    names: dict[Any, str] = field(default_factory=dict)
    daemons: Daemons = field(default_factory=Daemons)
    timeout_seconds: float = 600.0
    """How long processes wait for one of them that is silent."""
    start_seconds: float = 1800.0
    """How long one may take to start."""
    handles: dict[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    attendant: Attendant | None = None
    """Whose calls are looked after in every wait of this process."""
    _replaceable: set[str] = field(default_factory=set, init=False)
    """Processes whose death does not end the run."""
    _lost: dict[str, str] = field(default_factory=dict, init=False)
    """What became of those that have died."""
    _looked: float = field(default_factory=time.monotonic, init=False)
    """When all processes were looked after for the last time."""
    _asked: dict[Any, str] = field(default_factory=dict, init=False)
    """Calls that ask a process whether it still runs."""
    _heard: set[str] = field(default_factory=set, init=False)
    """Processes that have started, or answered: one that still starts is not silent."""
    _waited: float = field(default=0.0, init=False)
    """Seconds since then, of those that this process was awake in."""

    @property
    def dependent_seconds(self) -> float:
        """Timeout of processes that wait for a process which can be replaced: longer than detecting its silence."""
        return PART_FOR_DEPENDENTS * self.timeout_seconds + SECONDS_FOR_DEPENDENTS

    def add(self, name: str, handle: Any) -> None:
        """`handle.watch` must block for ever, in a concurrency group of its own."""
        self.names[handle.watch.remote()] = name
        self.handles[name] = handle

    def let_die(self, handles: Sequence[Any]) -> None:
        """From now on these processes may die; then `lost` says so, and `replace` puts others in their places."""
        self._replaceable |= {self.name_of(handle) for handle in handles}

    def lost(self, handle: Any) -> str | None:
        """What became of a replaceable process; None while it is well."""
        return self._lost.get(self.name_of(handle))

    @property
    def any_lost(self) -> bool:
        return bool(self._lost)

    def replace(self, handle: Any, other: Any) -> None:
        """`other` takes the name of `handle`, a replaceable process, which is dead or as good as dead."""
        name = self.name_of(handle)
        self._lose(name, "")
        del self._lost[name]
        self.places.forget(handle)
        self.add(name, other)

    def name_hosts(self, hosts: Sequence[str]) -> None:
        """Where each process that was added runs, in their order, for messages."""
        told = {name: f"{name} on {host}" for name, host in zip(self.handles, hosts, strict=True)}
        self.names = {ref: told[name] for ref, name in self.names.items()}
        self.handles = {told[name]: handle for name, handle in self.handles.items()}
        self._replaceable = {told[name] for name in self._replaceable}
        self._heard = {told[name] for name in self._heard}
        self._asked = {call: told[name] for call, name in self._asked.items()}

    def add_call(self, handle: Any, call: Any) -> None:
        """`call` of a process that was added ends only when the process has nothing more to do for the run."""
        self.names[call] = self.name_of(handle)

    def name_of(self, handle: Any) -> str:
        return next(name for name, known in self.handles.items() if known is handle)

    def get(self, refs: Sequence[Any], needs: Sequence[Any] = ()) -> list[Any]:
        """Results of `refs`, in order. `needs`: handles of other processes without which they cannot come.

        Raises: the typed error that a process raised, with that process in its message; WorkerDiedError naming the
        process that died or failed, as soon as either happens, whatever else is still running, and the replaceable
        process that was lost and owes a result, or is one of `needs`; ClusterDiedError when
        Ray is gone; KeyboardInterrupt in the place of both where a signal to stop has come (it may have gone to all
        processes).
        """
        with self._explained():
            return self._results(refs, needs)

    def get_started(self, starts: Mapping[Any, Sequence[Any]]) -> None:
        """Waits for the ends of set-ups, each by the processes that take part in it.

        Raises: as `get`, also for a process that may die; WorkerDiedError naming those that are not ready within
        `start_seconds`.
        """
        with self._explained():
            self._require_started(starts)

    def _require_started(self, starts: Mapping[Any, Sequence[Any]]) -> None:
        pending, deadline = list(starts), self.start_deadline()
        while pending:
            ready, pending = self.wait(pending, len(pending))
            for ref in ready:
                self.value(ref)
                self._heard |= {self.name_of(handle) for handle in starts[ref]}
            self._require_in_time([handle for ref in pending for handle in starts[ref]], deadline)

    def start_deadline(self) -> float:
        """By which one that starts now has to be ready, on time.monotonic()."""
        return time.monotonic() + self.start_seconds

    def has_started(self, start: Any, handles: Sequence[Any], deadline: float) -> bool:
        """Whether a set-up has ended, without waiting for it.

        Raises: as `get_started`, where it has not by the deadline.
        """
        ended, _ = ray.wait([start], timeout=0)
        with self._explained():
            if ended:
                self.value(start)
                self._heard |= {self.name_of(handle) for handle in handles}
            else:
                self._require_in_time(handles, deadline)
        return bool(ended)

    def _require_in_time(self, handles: Sequence[Any], deadline: float) -> None:
        names = [self.name_of(handle) for handle in handles]
        if names and time.monotonic() > deadline:
            self._give_up(
                names,
                f"did not start within {self.start_seconds:g} s (cluster.start_timeout_seconds): see what its log "
                "says last, or raise that key",
            )
        for name in names:  # the others of its engine may wait for it without end
            if name in self._lost:
                raise WorkerDiedError(self._lost[name])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns a death into what `get` says of it."""
        try:
            yield
        except ClusterDiedError:
            STOPS.end()
            raise
        except WorkerDiedError as error:
            STOPS.end()
            raise WorkerDiedError("\n".join([str(error), *self._meanwhile()])) from None

    def _results(self, refs: Sequence[Any], needs: Sequence[Any]) -> list[Any]:
        pending, results = list(dict.fromkeys(refs)), {}
        while pending:
            # All at once: waiting for one at a time would pass every reference to Ray once per result.
            ready, pending = self.wait(pending, len(pending))
            for ref in ready:
                results[ref] = self.value(ref)
            if pending:
                self._require_present(pending, needs)
        return [results[ref] for ref in refs]

    def _require_present(self, pending: Sequence[Any], needs: Sequence[Any]) -> None:
        """A stopped process keeps its calls open for ever.

        Raises: WorkerDiedError if a lost process owes one of the results, or is needed for them.
        """
        names = {id(handle): name for name, handle in self.handles.items()} if needs or self._lost else {}
        if any(id(handle) not in names for handle in needs):
            raise WorkerDiedError("a process that was needed has been replaced")
        needed = [names[id(handle)] for handle in needs]
        owing = [self._called(ref) for ref in pending] if self._lost else []
        for name in (*needed, *owing):
            if name in self._lost:
                raise WorkerDiedError(self._lost[name])

    def wait(self, refs: Sequence[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        """Those of `refs` that have ended, `num_returns` of them if it does not take long, and the others.

        Raises: as `get`, of processes that owe none of them.
        """
        STOPS.raise_swallowed()
        if (name := self.daemons.dead()) is not None:
            raise ClusterDiedError(f"Ray's {name} died, and with it every process of the run")
        ready, pending = self._ended(refs, num_returns)
        if self.names and (pending or not refs) and time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            elapsed, self._looked = time.monotonic() - self._looked, time.monotonic()
            self.places.update()
            dead, _ = ray.wait(list(self.names), num_returns=1, timeout=0)
            if dead:
                self._report_death(dead[0])
            self._ask(min(elapsed, 2 * SECONDS_BETWEEN_LOOKS))
        return ready, pending

    def _ended(self, refs: Sequence[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        """As `wait`. The calls of the attendant are handed to it; then fewer than `num_returns` may come."""
        own = self.attendant.calls() if self.attendant is not None else []
        if self.attendant is None or not own:
            ready, pending = ray.wait(
                list(refs), num_returns=num_returns, timeout=SECONDS_BETWEEN_LOOKS, fetch_local=False
            )
            return ready, pending
        every = [*refs, *own]
        # Each look costs as much as there are calls: they wait a little for each other.
        enough = max(1, len(own) // PART_OF_CALLS)
        seconds = SECONDS_BETWEEN_LOOKS if enough == 1 else SECONDS_TO_GATHER
        ended, _ = ray.wait(every, num_returns=enough, timeout=seconds, fetch_local=False)
        if ended and len(ended) < len(every):  # and what has ended beside them
            ended, _ = ray.wait(every, num_returns=len(every), timeout=0, fetch_local=False)
        there = set(ended)
        if of_attendant := [call for call in own if call in there]:
            self.attendant.ended(of_attendant)
        return [ref for ref in refs if ref in there], [ref for ref in refs if ref not in there]

    def _ask(self, seconds: float) -> None:
        """`seconds` after the last time. A stopped process is not dead, and nobody may be waiting for it in a
        collective that would say so.

        Raises: WorkerDiedError when some process has been silent, or has hung, for `timeout_seconds`.
        """
        self._waited += seconds
        answered, silent = (
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        )
        self._heard |= {self._asked[call] for call in answered}
        names = [self._asked[call] for call in silent if self._asked[call] in self._heard]
        self._require_moving({self._asked.pop(call): call for call in answered})
        if names and self._waited > self.timeout_seconds:
            self._give_up(names, f"did not answer for {self.timeout_seconds:g} s")
        if not names and self._waited > self.timeout_seconds / QUESTIONS_PER_TIMEOUT:
            self._asked = {handle.seconds_stuck.remote(): name for name, handle in self.handles.items()}
            self._waited = 0.0

    def _require_moving(self, answers: dict[str, Any]) -> None:
        for name, call in answers.items():
            with contextlib.suppress(RayError):  # it is dead
                if (seconds := ray.get(call)) > self.timeout_seconds:
                    self._give_up([name], f"has hung for {seconds:.0f} s in one call")

    def _give_up(self, names: Sequence[str], why: str) -> None:
        """Raises: WorkerDiedError unless all of them can be replaced."""
        if not self._replaceable.issuperset(names):
            raise WorkerDiedError(f"{', '.join(names)} {why}")
        for name in names:
            self._lose(name, f"{name} {why}")

    def _lose(self, name: str, why: str) -> None:
        self.names = {ref: other for ref, other in self.names.items() if other != name}
        self._asked = {call: other for call, other in self._asked.items() if other != name}
        self._heard.discard(name)
        self._lost[name] = why

    def value(self, ref: Any) -> Any:
        """The result of a call that has ended.

        Raises: as `get`; also WorkerDiedError where a replaceable process has died.
        """
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, PeerLostError):
                self.blame_the_dead()
            if isinstance(cause, OSError):
                cause = storage_error(cause) or cause
            origin = origin_of(error.cause) or self._called(ref)
            if isinstance(cause, McoreRLError):
                raise named(cause, origin) from None
            self.blame_the_dead()
            raise WorkerDiedError(f"{origin or 'a process'} failed: {last_lines(error)}") from None
        except RayError as error:
            self.blame_the_dead()
            name = self._called(ref)
            why = first_line(error) if name is None else self.places.death(self.handles[name], name, error)
            raise WorkerDiedError(f"{name or 'a process'} died: {why}") from None

    def _called(self, ref: Any) -> str | None:
        """Name of the process that was called with the result `ref`; None if it is not of this run."""
        if not hasattr(ref, "task_id"):
            return None
        called = ref.task_id().actor_id()
        return next((name for name, handle in self.handles.items() if handle._actor_id == called), None)

    def _meanwhile(self) -> list[str]:
        """What the processes that still run are waiting in, of their collectives, and which of them do not answer."""
        calls = {
            handle.pending_collectives.remote(): name for name, handle in self.handles.items() if name not in self._lost
        }
        answered, silent = ray.wait(list(calls), num_returns=len(calls), timeout=SECONDS_TO_SAY) if calls else ([], [])
        lines = []
        for call in answered:
            with contextlib.suppress(RayError):  # it is dead
                lines += [f"{calls[call]} waits in {collective}" for collective in ray.get(call)]
        return lines + [f"{calls[call]} does not answer" for call in silent]

    def blame_the_dead(self, handles: Sequence[Any] = ()) -> None:
        """Waits a while for a death that explains what has failed: of any process, or only of `handles`.

        Raises: WorkerDiedError naming the process, unless it can be replaced.
        """
        names = {self.name_of(handle) for handle in handles} or set(self.handles)
        if not names.isdisjoint(self._lost):  # which is explanation enough
            return
        refs = [ref for ref, name in self.names.items() if name in names]
        ready, _ = ray.wait(refs, num_returns=1, timeout=SECONDS_FOR_A_DEATH_TO_SHOW)
        if ready:
            self._report_death(ready[0])

    def _report_death(self, ref: Any) -> None:
        """Raises: WorkerDiedError unless it can be replaced."""
        name = self.names[ref]
        try:
            ray.get(ref, timeout=1)
        except (RayActorError, OutOfMemoryError) as error:
            why = f"died: {self.places.death(self.handles[name], name, error)}"
        except RayTaskError as error:
            why = f"stopped: {error.cause if isinstance(error.cause, McoreRLError) else first_line(error)}"
        except (RayError, GetTimeoutError) as error:
            why = f"stopped: {first_line(error)}"
        else:
            why = "ended: see its log in run.logs"
        self._give_up([name], why)


def kill_all(handles: Sequence[Any], seconds: float = 10.0) -> None:
    """Kills actors at once and waits, up to `seconds`, until those of this host are gone."""
    calls = [handle.where.remote() for handle in handles]
    # Who is dead already or does not answer is killed below all the same.
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=1) if calls else ([], [])
    pids = []
    for call in answered:
        with contextlib.suppress(RayError):
            host, pid = ray.get(call)
            pids += [pid] if host == this_host() else []
    for handle in handles:
        ray.kill(handle, no_restart=True)
    deadline = time.monotonic() + seconds
    while any(pid_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
