"""The one thread that steps an engine, and does between two steps whatever others ask for.

Nothing waits for a batch: requests are taken, aborted and handed out while others run, and weights change under them,
all at the one place where no pass is in progress. A response that has drawn as much as it may under one version of the
weights is parked: aborted, and submitted again with what it has when weights have changed, or nothing else runs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from mcore_rl.errors import PeerLostError, WorkerDiedError
from mcore_rl.ports import Engine
from mcore_rl.rollout.journal import Drawn, Journal
from mcore_rl.rollout.streaming.parking import Parking
from mcore_rl.types import Completion, Delta, GenerationRequest

ENDED = "the engine's loop has ended"
T = TypeVar("T")
_Asked = Callable[[], None] | None
Listener = Callable[[Completion | BaseException], None]
"""Called on the loop's thread with what became of a request; it must not wait for anything."""
Begun = Callable[[], None]
"""Called on the loop's thread when a request has its first token from this engine; it must not wait for anything."""
Choose = Callable[[Collection[str]], Collection[str]]
"""Some of the requests that have not begun."""


def _unheard() -> None: ...


class EngineLoop:
    """Owns `engine` from the call of `serve` on; every other method may be called from any thread but that one. What
    the engine draws goes into `journal`."""

    def __init__(self, engine: Engine, journal: Journal | None = None) -> None:
        self.engine = engine
        self._journal = journal
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._unbegun: dict[str, Begun] = {}
        self._parking = Parking()
        self._version = engine.weight_version
        self._serving = True
        self._busy_seconds = 0.0
        self._tokens_carried_over = 0
        self._began: float | None = None
        """When what is being done between two looks at the requests began."""
        self._died: WorkerDiedError | None = None
        self._door = threading.Lock()
        """Nothing is asked any more once the loop has ended."""

    def serve(self) -> None:
        """Steps the engine while anything runs, until `stop`. What a step raises ends the requests that run, and goes
        to those who wait for them: the engine knows by itself whether it can go on.

        Raises: WorkerDiedError, whoever it was told already, when a process of the engine has died: nothing can be
        generated any more.
        """
        while self._died is None and self._do_what_is_asked():
            if not self.engine.num_running:  # whoever is parked keeps nobody from anything then
                self._go_on()
            if self.engine.num_running:
                with self._working():
                    self._step()
        with self._door:
            self._serving = False
        if self._died is not None:
            self._fail(self._died)
            while not self._asked.empty():  # they learn it too
                if (run := self._asked.get()) is not None:
                    run()
            raise self._died

    def _step(self) -> None:
        try:
            deltas, completions = self.engine.step()
        except Exception as error:
            self._note_death(error)
            self._fail(error)
            return
        if self._journal is not None:
            self._journal.add(deltas, completions)
        if self._unbegun:
            self._note_begun(deltas)
        self._parking.leave([completion.request_id for completion in completions])
        for completion in completions:
            self._listeners.pop(completion.request_id)(completion)
        self._park(self._parking.count(deltas))

    @property
    def busy_seconds(self) -> float:
        """In which requests ran, since the beginning."""
        return self._busy_seconds

    @property
    def tokens_carried_over(self) -> int:
        """Of responses that were parked, when they went on, since the beginning."""
        return self._tokens_carried_over

    @property
    def seconds_stuck(self) -> float:
        """Since the present step, or what is done between two of them, began; 0 while the engine waits for requests."""
        began = self._began
        return time.monotonic() - began if began is not None else 0.0

    @property
    def num_parked(self) -> int:
        return self._parking.num_waiting

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._began = began = time.monotonic()
        running = self.engine.num_running > 0
        try:
            yield
        finally:
            self._began = None
            if running:
                self._busy_seconds += time.monotonic() - began

    def stop(self) -> None:
        """`serve` returns when what was asked before is done; who still waits for a response learns that."""
        with self._door:
            self._serving = False
            self._asked.put(None)

    def between_steps(self, call: Callable[[], T]) -> T:
        """The result of `call` on the loop's thread, as soon as the present step is over. Raises what it raises."""
        return self._soon(call).result()

    def _soon(self, call: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()

        def run() -> None:
            try:
                if self._died is not None:
                    raise self._died
                result.set_result(call())
            except BaseException as error:
                self._note_death(error)
                result.set_exception(error)

        self._ask(run)
        return result

    def submit(self, requests: Sequence[GenerationRequest], listener: Listener, begun: Begun = _unheard) -> None:
        """Engine.submit; `listener` hears what becomes of each, and `begun` is called for each. A request that has
        tokens_per_version is parked whenever it has drawn so many."""
        self.between_steps(lambda: self._submit(requests, listener, begun))

    def submit_soon(
        self, requests: Sequence[GenerationRequest], listener: Listener, begun: Begun | None = None
    ) -> None:
        """As `submit`, without waiting for it: `listener` hears of a refusal too. Without `begun` they cannot be
        withdrawn."""

        def submit() -> None:
            try:
                if self._died is not None:
                    raise self._died
                self._submit(requests, listener, begun)
            except Exception as error:
                self._note_death(error)
                listener(error)

        self._ask(submit)

    def abort(self, request_ids: Collection[str]) -> list[Completion]:
        """Engine.abort; nobody hears of them any more."""
        return self.between_steps(lambda: self._abort(request_ids))

    def abort_soon(self, request_ids: Collection[str]) -> None:
        """As `abort`, without waiting for it; nothing once the loop has ended."""

        def abort() -> None:
            with contextlib.suppress(Exception):  # an engine that is gone cannot end them either
                self._abort(request_ids)

        with contextlib.suppress(RuntimeError):
            self._ask(abort)

    def take_over(self, responses: Sequence[Drawn]) -> Future[None]:
        """As Journal.take_over: done when they are in the journal."""
        journal = self._journal
        return self._soon(lambda: None if journal is None else journal.take_over(responses))

    def copy_journal(self, path: Path, request_ids: Collection[str]) -> bool:
        """As Journal.copy; False where there is none."""
        if (journal := self._journal) is None:
            return False
        self.between_steps(lambda: journal.copy(path, request_ids))
        return True

    def release(self, request_ids: Collection[str]) -> None:
        """As Journal.release, without waiting for it: before whatever is asked later. Nothing once the loop has
        ended."""
        if (journal := self._journal) is not None and request_ids:
            with contextlib.suppress(RuntimeError):
                self._soon(lambda: journal.release(request_ids))

    def _submit(self, requests: Sequence[GenerationRequest], listener: Listener, begun: Begun | None) -> None:
        self.engine.submit(requests)
        if self._journal is not None:
            self._journal.begin(requests)
        parked = self._parking.begin(requests, self._version)
        self._listeners |= {request.request_id: listener for request in requests}
        if begun is not None:
            self._unbegun |= {request.request_id: begun for request in requests}
        self._park(parked)

    def _abort(self, request_ids: Collection[str]) -> list[Completion]:
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
            self._unbegun.pop(request_id, None)
        parked = self._parking.leave(request_ids)
        self._forget(request_ids)
        return [*self.engine.abort(request_ids), *parked]

    def _forget(self, request_ids: Collection[str]) -> None:
        """Of an engine that has died, others go on with all that ran."""
        if self._journal is not None and self._died is None:
            self._journal.forget(request_ids)

    def _ask(self, run: Callable[[], None]) -> None:
        with self._door:
            if not self._serving:
                raise RuntimeError(ENDED)
            self._asked.put(run)

    def withdraw(self, choose: Choose) -> None:
        """Aborts what `choose`, called between two steps, chooses of the requests that have no token from this engine;
        who waits for one hears of it."""

        def withdraw() -> None:
            request_ids = choose(self._unbegun.keys())
            if not request_ids:
                return
            listeners = {request_id: self._listeners.pop(request_id) for request_id in request_ids}
            for request_id in request_ids:
                del self._unbegun[request_id]
            parked = self._parking.leave(request_ids)
            self._forget(request_ids)
            try:
                aborted: Mapping[str, Completion] = {
                    completion.request_id: completion for completion in [*self.engine.abort(request_ids), *parked]
                }
            except BaseException as error:
                for listener in listeners.values():
                    listener(error)
                raise
            for request_id, listener in listeners.items():
                listener(aborted[request_id])

        self.between_steps(withdraw)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_finish: Callable[[Completion], None],
        begun: Begun = _unheard,
    ) -> None:
        """Responses to all requests, beside whatever else runs; calls on_finish on this thread, once per request, in
        the order they finish, while the engine goes on; those that were withdrawn have the reason "abort".

        Raises: what the engine raises, and what on_finish raises: none of them runs then.
        """
        ended: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self.submit(requests, ended.put, begun)
        left = {request.request_id for request in requests}
        try:
            while left:
                completion = ended.get()
                if isinstance(completion, BaseException):
                    raise completion
                left.remove(completion.request_id)
                on_finish(completion)
        finally:
            if left:
                self.abort(left)

    def _note_begun(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if (begun := self._unbegun.pop(delta.request_id, None)) is not None:
                begun()

    def _note_death(self, error: BaseException) -> None:
        """Of a process of the engine; that of a peer in a sync is not its end."""
        if isinstance(error, WorkerDiedError) and not isinstance(error, PeerLostError):
            self._died = error

    def _do_what_is_asked(self) -> bool:
        """All of it, in the order it came; waits for something while nothing runs. False: this is the end."""
        with contextlib.suppress(queue.Empty):
            while self._died is None:
                run = self._asked.get(block=not self.engine.num_running and not self._parking.may_go_on)
                if run is None:
                    self._fail(RuntimeError(ENDED))
                    return False
                with self._working():
                    run()
                if self._died is None and self.engine.weight_version != self._version:
                    self._version = self.engine.weight_version
                    self._parking.weights_changed(self._version)
                    self._go_on()
        return True

    def _park(self, request_ids: Collection[str]) -> None:
        """In the journal they still run: others go on with them if the engine dies."""
        if request_ids:
            try:
                self._parking.park(self.engine.abort(request_ids))
            except Exception as error:
                self._note_death(error)
                self._fail(error)

    def _go_on(self) -> None:
        """Submits again what is parked, as far as the present weights will do."""
        if requests := self._parking.go_on(self._version):
            partial = [request.partial for request in requests if request.partial is not None]
            self._tokens_carried_over += sum(len(completion.token_ids) for completion in partial)
            with self._working():
                try:
                    self.engine.submit(requests)
                except Exception as error:
                    self._note_death(error)
                    self._fail(error)

    def _fail(self, error: BaseException) -> None:
        listeners, self._listeners = self._listeners, {}
        self._unbegun.clear()
        self._parking.leave(listeners)
        self._forget(listeners)
        with contextlib.suppress(Exception):  # an engine that is gone cannot end them either
            self.engine.abort(list(listeners))
        for listener in listeners.values():
            listener(error)
