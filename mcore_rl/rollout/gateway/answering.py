"""Response of the server that waits for the model, and cancels the sampling if its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeVar

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from mcore_rl.rollout.gateway.dialects.interface import Call, Dialect, json_bytes
from mcore_rl.rollout.gateway.exchange import ChatReply, RefusedError
from mcore_rl.rollout.gateway.progress import ProgressReceiver, ReplyProgress, ReplyStart, TextDelta

T = TypeVar("T")

PING_SECONDS = 5.0
"""Time between bytes of a stream while the model samples. Proxies close connections that are silent for 30 to 60 s."""
LOOP_PASSES = 4
"""Passes of the event loop from the end of a connection to the end of the task that waits for it."""
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class ClientLeftError(Exception):
    """The client closed its connection before the reply was sent."""


def json_response(status: int, body: bytes) -> Response:
    """Return a response with a JSON body."""
    return Response(body, status, media_type="application/json")


def refusal(dialect: Dialect, error: RefusedError) -> Response:
    """Return an error in the form of a dialect."""
    response = json_response(error.status, json_bytes(dialect.error(error)))
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


class Answering(Response):
    """ASGI response that waits for a reply and sends it in the form that its call wants.

    The events of a stream are sent while the reply is sampled, and pings while there is no new text. If the client
    reads slowly, the next event has all text since the last one. The status of a stream is sent with its first byte:
    errors before it have their own status, later ones are events.

    answer: function that samples the reply. It is cancelled if the client closes the connection.
    missed: called with a complete reply whose client left before all of it was sent.
    """

    def __init__(
        self,
        dialect: Dialect,
        call: Call,
        answer: Callable[[ProgressReceiver], Coroutine[object, object, ChatReply]],
        missed: Callable[[ChatReply], Coroutine[object, object, None]],
    ) -> None:
        super().__init__()
        self._dialect, self._call, self._answer, self._missed = dialect, call, answer, missed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = _Stream()
        answer = asyncio.create_task(self._answer(stream.follow))
        left = asyncio.create_task(_disconnection(receive))
        try:
            if self._call.request.stream:
                for each in (answer, left):
                    each.add_done_callback(lambda _: stream.wake.set())
                await self._respond_in_events(stream, answer, left, scope, receive, send)
            else:
                await self._respond(answer, left, scope, receive, send)
        except ClientLeftError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                await self._missed(answer.result())
        finally:
            await _cancelled(answer, left)

    async def _respond(
        self, answer: asyncio.Future[ChatReply], left: asyncio.Task[None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the reply as one body."""
        await _answered(answer, left)
        try:
            reply = answer.result()
            await _settled()
        except RefusedError as error:
            await refusal(self._dialect, error)(scope, receive, send)
            return
        body = json_bytes(self._call.body(reply))
        _check_connection(left)
        await json_response(200, body)(scope, receive, send)

    async def _respond_in_events(
        self,
        stream: _Stream,
        answer: asyncio.Future[ChatReply],
        left: asyncio.Task[None],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send the reply as events."""
        events, has_begun = self._call.events(), False
        loop = asyncio.get_running_loop()
        last = loop.time()
        """Time of the last bytes."""

        async def send_all(chunks: Iterable[bytes]) -> None:
            nonlocal has_begun, last
            for chunk in chunks:
                _check_connection(left)
                if not has_begun:
                    has_begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                await send(_chunk(chunk))
                last = loop.time()

        while not answer.done():
            _check_connection(left)
            if new := stream.take():
                await send_all(event.encoded() for event in events.more(*new))
            # New texts may be without events: clients that did not ask for reasoning do not get it.
            elif (rest := last + PING_SECONDS - loop.time()) <= 0:
                await send_all([self._dialect.ping])
            else:
                await stream.wait(rest)
        try:
            reply = answer.result()
            await _settled()
            await send_all(event.encoded() for event in events.end(reply))
        except RefusedError as error:
            if not has_begun:
                await refusal(self._dialect, error)(scope, receive, send)
                return
            await send_all([events.error(error).encoded()])
            await send(_chunk(b"", last=True))
            if answer.exception() is None:  # the reply differs from the text that was sent
                await self._missed(answer.result())
            return
        _check_connection(left)
        await send(_chunk(b"", last=True))


class _Stream:
    """Progress of one reply, and what a client has not received of it."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set if there may be new texts, or if the reply or the connection has ended."""
        self._progress: ReplyProgress | None = None
        self._num_taken = 0

    def follow(self, progress: ReplyProgress) -> None:
        """Follow the progress of the reply; a ProgressReceiver."""
        self._progress = progress
        progress.changed.append(self.wake.set)
        self.wake.set()

    def take(self) -> tuple[ReplyStart, list[TextDelta]] | None:
        """Return the texts since the last call, None if there are none."""
        self.wake.clear()
        progress = self._progress
        if progress is None or progress.start is None or len(progress.deltas) == self._num_taken:
            return None
        new, self._num_taken = progress.deltas[self._num_taken :], len(progress.deltas)
        return progress.start, new

    async def wait(self, seconds: float) -> None:
        """Wait for `wake`, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wake.wait()


async def unless_left(request: Request, work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`, which is cancelled if the client closes the connection.

    Raises: ClientLeftError.
    """
    task, left = asyncio.create_task(work), asyncio.create_task(_disconnection(request.receive))
    try:
        await _answered(task, left)
        return task.result()
    finally:
        await _cancelled(task, left)


async def _cancelled(*tasks: asyncio.Future[T] | asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _answered(answer: asyncio.Future[T], left: asyncio.Task[None]) -> None:
    """Wait for the answer. Raises: ClientLeftError."""
    await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
    if not answer.done():
        raise ClientLeftError


async def _settled() -> None:
    """Let the event loop report a connection that was closed while the reply was made."""
    for _ in range(LOOP_PASSES):
        await asyncio.sleep(0)


def _check_connection(left: asyncio.Task[None]) -> None:
    """Raise ClientLeftError if the client has closed the connection. uvicorn drops the bytes for it silently."""
    if left.done():
        raise ClientLeftError


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _chunk(data: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not last}
