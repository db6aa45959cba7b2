"""Response of the server that waits for the model, and cancels the sampling if its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from mcore_rl.rollout.gateway.dialects.interface import Call, Dialect, json_bytes
from mcore_rl.rollout.gateway.exchange import ChatReply, RefusedError

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

    The model's whole turn is sampled before the first event is sent, because calls are parsed from the whole turn.
    Pings keep a stream open until then. The status of a stream is sent with its first byte: errors before the first
    ping have their own status, later ones are events.

    answer: function that samples the reply. It is cancelled if the client closes the connection.
    missed: called with a complete reply whose client left before all of it was sent.
    """

    def __init__(
        self,
        dialect: Dialect,
        call: Call,
        answer: Callable[[], Coroutine[object, object, ChatReply]],
        missed: Callable[[ChatReply], Coroutine[object, object, None]],
    ) -> None:
        super().__init__()
        self._dialect, self._call, self._answer, self._missed = dialect, call, answer, missed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer())
        left = asyncio.create_task(_disconnection(receive))
        try:
            await self._respond(answer, left, scope, receive, send)
        except ClientLeftError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                await self._missed(answer.result())
        finally:
            await _cancelled(answer, left)

    async def _respond(
        self, answer: asyncio.Future[ChatReply], left: asyncio.Task[None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        seconds = PING_SECONDS if self._call.stream else None
        in_time = await _answered(answer, left, seconds)
        if not in_time:
            await _start_events(send)
            await send(_chunk(self._dialect.ping))
            while not await _answered(answer, left, PING_SECONDS):
                await send(_chunk(self._dialect.ping))
        try:
            reply = answer.result()
            await _settled()
        except RefusedError as error:
            if in_time:
                await refusal(self._dialect, error)(scope, receive, send)
            else:
                await send(_chunk(self._dialect.error_event(error).encoded(), last=True))
            return
        if not self._call.stream:
            body = json_bytes(self._call.body(reply))
            _check_connection(left)
            await json_response(200, body)(scope, receive, send)
            return
        if in_time:
            await _start_events(send)
        for event in self._call.events(reply):
            _check_connection(left)
            await send(_chunk(event.encoded()))
        _check_connection(left)
        await send(_chunk(b"", last=True))


async def unless_left(request: Request, work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`, which is cancelled if the client closes the connection.

    Raises: ClientLeftError.
    """
    task, left = asyncio.create_task(work), asyncio.create_task(_disconnection(request.receive))
    try:
        await _answered(task, left, None)
        return task.result()
    finally:
        await _cancelled(task, left)


async def _cancelled(*tasks: asyncio.Future[T] | asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _answered(answer: asyncio.Future[T], left: asyncio.Task[None], seconds: float | None) -> bool:
    """Wait for the answer. Returns False after `seconds`. Raises: ClientLeftError."""
    await asyncio.wait((answer, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if not answer.done() and left.done():
        raise ClientLeftError
    return answer.done()


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


async def _start_events(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})


def _chunk(data: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not last}
