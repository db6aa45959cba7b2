"""An engine's loop for coroutines, which run on another thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from mcore_rl.rollout.journal import Drawn
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.types import Completion, GenerationRequest


class WithdrawnError(BaseException):
    """The engine gave a request up before it had begun: another one makes the whole response. No Exception: an
    episode's `except Exception` must not go on with it."""


class EngineClient:
    """A TokenSource of one asyncio loop. Responses that end with one pass of the engine wake it once."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._ended: deque[tuple[asyncio.Future[Completion], Completion | BaseException]] = deque()
        self._wakes = False
        """Whether it will look at them."""

    async def generate(self, request: GenerationRequest, begun: Callable[[], None] | None = None) -> Completion:
        """With `begun`, which is called then, it can be withdrawn until it has begun.

        Raises: what the engine raises; DataError for a request that it refuses; WithdrawnError.
        """
        asyncio_loop = asyncio.get_running_loop()
        ended: asyncio.Future[Completion] = asyncio_loop.create_future()

        def listener(result: Completion | BaseException) -> None:
            self._ended.append((ended, result))
            if not self._wakes:
                self._wakes = True
                with contextlib.suppress(RuntimeError):  # the asyncio loop has been closed
                    asyncio_loop.call_soon_threadsafe(self._settle)

        self._loop.submit_soon([request], listener, begun)
        try:
            completion = await ended
            if completion.finish_reason == "abort":
                raise WithdrawnError
            return completion
        except asyncio.CancelledError:
            self._loop.abort_soon([request.request_id])
            raise

    def _settle(self) -> None:
        self._wakes = False  # before it looks: what comes later wakes it again
        while self._ended:
            ended, result = self._ended.popleft()
            if ended.done():  # cancelled meanwhile
                continue
            if isinstance(result, BaseException):
                ended.set_exception(result)
            else:
                ended.set_result(result)

    async def take_over(self, drawn: Drawn) -> None:
        """As EngineLoop.take_over."""
        await asyncio.wrap_future(self._loop.take_over([drawn]))


class AttemptClient:
    """A TokenSource for one attempt, whose first request has the id `first_id`. `begin` is called once, when that one
    begins, or anything else of the attempt: until then it can be withdrawn.

    What lost engines had drawn is not drawn again; `drawn` by the request's id. A request whose history differs has
    another id or seed, and draws anew.
    """

    def __init__(
        self, client: EngineClient, drawn: Mapping[str, Drawn], first_id: str, begin: Callable[[], None]
    ) -> None:
        self._client, self._drawn, self._first_id, self._begin = client, drawn, first_id, begin
        self._door = threading.Lock()
        self._has_begun = False
        self.taken_over = 0

    def begin(self) -> None:
        """Once; the engine's thread may say so as well as that of the episodes."""
        with self._door:
            before, self._has_begun = self._has_begun, True
        if not before:
            self._begin()

    async def generate(self, request: GenerationRequest) -> Completion:
        found = self._drawn.get(request.request_id)
        if found is None or found.seed != request.seed:
            return await self._sample(request)
        self.taken_over += len(found.completion.token_ids)
        if found.finish_reason is not None:
            self.begin()
            await self._client.take_over(found)
            return replace(found.completion, finish_reason=found.finish_reason)
        return await self._sample(replace(request, partial=found.completion))

    async def _sample(self, request: GenerationRequest) -> Completion:
        if request.request_id == self._first_id and not self._has_begun:
            return await self._client.generate(request, self.begin)
        self.begin()
        return await self._client.generate(request)
