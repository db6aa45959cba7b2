"""An engine's loop for coroutines, which run on another thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace

from mcore_rl.rollout.journal import Drawn
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.types import Completion, GenerationRequest


class EngineClient:
    """A TokenSource; its `generate` belongs to the asyncio loop that calls it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def generate(self, request: GenerationRequest) -> Completion:
        """Raises: what the engine raises; DataError for a request that it refuses."""
        asyncio_loop = asyncio.get_running_loop()
        ended: asyncio.Future[Completion] = asyncio_loop.create_future()

        def settle(result: Completion | BaseException) -> None:
            if ended.done():  # cancelled meanwhile
                return
            if isinstance(result, BaseException):
                ended.set_exception(result)
            else:
                ended.set_result(result)

        def listener(result: Completion | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the asyncio loop has been closed
                asyncio_loop.call_soon_threadsafe(settle, result)

        self._loop.submit_soon([request], listener)
        try:
            return await ended
        except asyncio.CancelledError:
            self._loop.abort_soon([request.request_id])
            raise


class ResumingClient:
    """What lost engines had drawn is not drawn again; `drawn` by the request's id. A request whose history differs has
    another id or seed, and draws anew."""

    def __init__(self, client: EngineClient, drawn: Mapping[str, Drawn]) -> None:
        self._client, self._drawn = client, drawn
        self.taken_over = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        found = self._drawn.get(request.request_id)
        if found is None or found.seed != request.seed:
            return await self._client.generate(request)
        self.taken_over += len(found.completion.token_ids)
        if found.finish_reason is not None:
            return found.completion
        return await self._client.generate(replace(request, partial=found.completion))
