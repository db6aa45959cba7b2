"""Asyncio client of an engine's loop, which runs on another thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from mcore_rl.errors import DataError
from mcore_rl.rollout.journal import JournaledResponse
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.types import Completion, GenerationRequest


class WithdrawnError(BaseException):
    """The engine withdrew a request that had not started; another engine generates the response. Not an Exception, so
    that an episode's `except Exception` cannot catch it."""


class EngineClient:
    """TokenSource for one asyncio loop. It wakes the loop once for all responses that end in the same engine step."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._ended: deque[tuple[asyncio.Future[Completion], Completion | BaseException]] = deque()
        self._wakes = False
        """True while a wake-up is scheduled."""

    async def generate(self, request: GenerationRequest, started: Callable[[], None] | None = None) -> Completion:
        """Generate a response. With `started`, the request can be withdrawn until its first token, when `started` is
        called.

        Raises: errors of the engine; DataError for a rejected request; WithdrawnError.
        """
        asyncio_loop = asyncio.get_running_loop()
        ended: asyncio.Future[Completion] = asyncio_loop.create_future()

        def listener(result: Completion | BaseException) -> None:
            self._ended.append((ended, result))
            if not self._wakes:
                self._wakes = True
                with contextlib.suppress(RuntimeError):  # the asyncio loop has been closed
                    asyncio_loop.call_soon_threadsafe(self._settle)

        self._loop.submit_nowait([request], listener, started)
        try:
            completion = await ended
            if completion.finish_reason == "abort":
                raise WithdrawnError
            return completion
        except asyncio.CancelledError:
            self._loop.abort_nowait([request.request_id])
            raise

    def _settle(self) -> None:
        self._wakes = False  # reset first, so that results appended from now on schedule another wake-up
        while self._ended:
            ended, result = self._ended.popleft()
            if ended.done():  # cancelled in the meantime
                continue
            if isinstance(result, BaseException):
                ended.set_exception(result)
            else:
                ended.set_result(result)

    async def take_over(self, recovered: JournaledResponse) -> None:
        """Call EngineLoop.take_over."""
        await asyncio.wrap_future(self._loop.take_over([recovered]))


class AttemptClient:
    """TokenSource for one attempt, whose first request has the id `first_id`. `begin` is called once, when the first
    request or any other work of the attempt starts; until then, the attempt can be withdrawn.

    `recovered` holds responses of lost engines by request id; their tokens are not sampled again. A request with a
    different history has a different id or seed and is sampled completely.
    """

    def __init__(
        self, client: EngineClient, recovered: Mapping[str, JournaledResponse], first_id: str, begin: Callable[[], None]
    ) -> None:
        self._client, self._recovered, self._first_id, self._begin = client, recovered, first_id, begin
        self._lock = threading.Lock()
        self._has_started = False
        self.taken_over = 0
        self.failure: Exception | None = None
        """First error of the engine, which is remembered even if the episode catches it."""

    def begin(self) -> None:
        """Call `begin` once; may be called from the engine's thread and from the episodes' thread."""
        with self._lock:
            before, self._has_started = self._has_started, True
        if not before:
            self._begin()

    async def generate(self, request: GenerationRequest) -> Completion:
        try:
            return await self._generate(request)
        except DataError:
            raise  # the episode's fault: an invalid request
        except Exception as error:
            self.failure = self.failure or error
            raise

    async def _generate(self, request: GenerationRequest) -> Completion:
        found = self._recovered.get(request.request_id)
        # The seed includes the history, so a different seed means that a tool answered differently this time.
        if found is None or found.seed != request.seed:
            return await self._sample(request)
        self.taken_over += len(found.completion.token_ids)
        if found.finish_reason is not None:
            self.begin()
            await self._client.take_over(found)
            return replace(found.completion, finish_reason=found.finish_reason)
        return await self._sample(replace(request, partial=found.completion))

    async def _sample(self, request: GenerationRequest) -> Completion:
        if request.request_id == self._first_id and not self._has_started:
            return await self._client.generate(request, self.begin)
        self.begin()
        return await self._client.generate(request)
