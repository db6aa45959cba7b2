"""A fake Ray without processes; its time passes only in `wait`."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any, cast

from ray.exceptions import ActorDiedError, GetTimeoutError

from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.runtime.roles.base import RunProcess


class Call:
    """Reference of a fake call. It stands for the ObjectRef, its task id and its actor id."""

    ended = False
    answer: object = None

    def __init__(self, owner: object = None) -> None:
        self._owner = owner

    def task_id(self) -> Call:
        return self

    def actor_id(self) -> object:
        return self._owner


class Ray:
    """Calls end at given times."""

    def __init__(self) -> None:
        self.now = self.began = time.monotonic()
        self.waits = 0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def seconds(self) -> float:
        return self.now - self.began

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def end(self, call: Call, answer: object = None) -> Call:
        call.ended, call.answer = True, answer
        return call

    def call(self, seconds: float, answer: object = None) -> Call:
        """Return a call that ends after `seconds`."""
        call = Call()
        self.after(seconds, lambda: self.end(call, answer) and None)
        return call

    def wait(
        self, calls: list[Call], *, num_returns: int = 1, timeout: float, fetch_local: bool = True
    ) -> tuple[list[Call], list[Call]]:
        if not calls:
            return [], []
        assert len(set(calls)) == len(calls)
        assert 0 < num_returns <= len(calls)
        self.waits += 1
        deadline = self.now + timeout
        while sum(call.ended for call in calls) < num_returns and self._events and self._events[0][0] <= deadline:
            self.now, _, event = heapq.heappop(self._events)
            event()
        ended = [call for call in calls if call.ended][:num_returns]
        if len(ended) < num_returns:
            self.now = deadline
        return ended, [call for call in calls if call not in ended]

    def get(self, call: Call, timeout: float = 0.0) -> object:
        if not call.ended:
            raise GetTimeoutError
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer


class Process(ProcessHandle[RunProcess]):
    """Fake process. Calls end at once unless a subclass overrides them; open calls fail when it dies."""

    def __init__(self, ray: Ray, name: str = "process") -> None:
        super().__init__(name, cast(Any, None))
        self.ray, self.dead, self.open = ray, False, list[Call]()
        self.is_stopped = False

    @property
    def actor_id(self) -> int:
        return id(self)

    def call(self, method: Callable[..., object], *arguments: object, **options: object) -> Any:
        return getattr(self, method.__name__)(*arguments)

    def watch(self) -> object:
        return self.open_call()

    def where(self) -> object:
        return self.open_call()

    def seconds_stuck(self) -> object:
        return self.open_call() if self.is_stopped else self.ended(0.0)

    def pending_collectives(self) -> object:
        return self.ended([])

    def open_call(self) -> Call:
        """Return a call that has not ended."""
        call = Call(id(self))
        self.open.append(call)
        return self._fail(call) if self.dead else call

    def ended(self, answer: object) -> Call:
        call = Call()
        return self._fail(call) if self.dead else self.ray.end(call, answer)

    def die(self) -> None:
        self.dead = True
        for call in self.open:
            if not call.ended:
                self._fail(call)

    def _fail(self, call: Call) -> Call:
        return self.ray.end(call, ActorDiedError())
