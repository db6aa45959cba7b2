"""Interface between the HTTP server and its dialects."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, RefusedError
from mcore_rl.types.chat import ChatMessage
from mcore_rl.types.json import JsonObject, JsonValue

Earlier = Callable[[str], Sequence[ChatMessage] | None]
"""Function from the id of an earlier reply of the session to its conversation; None if it is not kept."""


@dataclass(frozen=True)
class Event:
    """Server-sent event. `data`: a JSON object or text. `name`: None if the dialect does not name its events."""

    data: JsonObject | str
    name: str | None = None

    def encoded(self) -> bytes:
        """Return the event as bytes of a text/event-stream."""
        data = self.data if isinstance(self.data, str) else json_bytes(self.data).decode()
        name = f"event: {self.name}\n" if self.name else ""
        return f"{name}data: {data}\n\n".encode()


@dataclass(frozen=True)
class Call(ABC):
    """Request of a client, and the forms of its reply.

    model: name of the model in replies, independent of the name in the request.
    stream: True if the client wants events.
    """

    model: str
    request: ChatRequest
    stream: bool

    @abstractmethod
    def body(self, reply: ChatReply) -> JsonObject:
        """Return the reply as one JSON object."""

    @abstractmethod
    def events(self, reply: ChatReply) -> Iterator[Event]:
        """Return the reply as events; their deltas concatenate to the texts of `body`."""

    def conversation(self, reply: ChatReply) -> Sequence[ChatMessage]:
        """Return the messages that later requests may continue by the id of the reply; empty: no request may."""
        return ()


@dataclass(frozen=True)
class Dialect:
    """One HTTP interface.

    path: path of its requests below the address of a session.
    read: function from (body, name of the model, earlier conversations) to a call. Raises RefusedError.
    error: form of an error as a body.
    error_event: form of an error after events have begun.
    ping: bytes that keep a connection open while the model samples; clients skip them.
    count_path: path of requests that count the tokens of a prompt, None: there is none. counted: form of their reply.
    """

    path: str
    read: Callable[[Mapping[str, JsonValue], str, Earlier], Call]
    error: Callable[[RefusedError], JsonObject]
    error_event: Callable[[RefusedError], Event]
    ping: bytes
    count_path: str | None = None
    counted: Callable[[int], JsonObject] = field(default=lambda tokens: {"input_tokens": tokens})


def json_bytes(value: JsonObject) -> bytes:
    """Return compact JSON as UTF-8. Raises: ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
