"""Interface between the HTTP server and its dialects."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rl.rollout.gateway.exchange import RESAMPLED, ChatReply, ChatRequest, Choice, RefusedError
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta, TokenLogp, joined
from mcore_rl.rollout.tools.turn_reader import Kind
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
    """

    model: str
    request: ChatRequest

    @abstractmethod
    def body(self, reply: ChatReply) -> JsonObject:
        """Return the reply as one JSON object."""

    @abstractmethod
    def events(self) -> ReplyEvents:
        """Return the form of the reply as events; their deltas concatenate to the texts of `body`."""

    def conversation(self, reply: ChatReply) -> Sequence[ChatMessage]:
        """Return the messages that later requests may continue by the id of the reply; empty: no request may."""
        return ()


class ReplyEvents(ABC):
    """One reply as events, while it is sampled. Subclasses have the form of a dialect."""

    def __init__(self) -> None:
        self._start: ReplyStart | None = None
        self._texts: defaultdict[tuple[int, Kind], list[str]] = defaultdict(list)
        self._num_tokens: defaultdict[int, int] = defaultdict(int)

    def more(self, start: ReplyStart, deltas: Sequence[TextDelta]) -> Iterator[Event]:
        """Yield the events of new texts."""
        if self._start is None:
            self._start = start
            yield from self._begin(start)
        for delta in joined(deltas):
            yield from self._sent(delta)

    def end(self, reply: ChatReply) -> Iterator[Event]:
        """Yield the events that complete the reply: texts that were not sent, calls, finish reasons and usage.

        Raises: RefusedError if the reply does not begin with the texts that were sent.
        """
        rests = [list(self._rest(number, choice)) for number, choice in enumerate(reply.choices)]
        start = self._start or ReplyStart(reply.id, reply.num_prompt_tokens, reply.created)
        yield from self.more(start, ())
        for number, (choice, rest) in enumerate(zip(reply.choices, rests, strict=True)):
            for delta in rest:
                yield from self._sent(delta)
            yield from self._end_choice(number, choice, _tokens(choice)[self._num_tokens[number] :])
        # Another engine may have repeated the reply later.
        yield from self._end(replace(reply, created=start.created))

    @abstractmethod
    def error(self, error: RefusedError) -> Event:
        """Return the event of an error that ends the reply."""

    @abstractmethod
    def _begin(self, start: ReplyStart) -> Iterator[Event]: ...

    @abstractmethod
    def _text(self, delta: TextDelta) -> Iterator[Event]: ...

    @abstractmethod
    def _end_choice(self, number: int, choice: Choice, tokens: Sequence[TokenLogp]) -> Iterator[Event]:
        """Yield the events after all texts of a choice. `tokens`: those that no delta has had."""

    @abstractmethod
    def _end(self, reply: ChatReply) -> Iterator[Event]: ...

    def _sent(self, delta: TextDelta) -> Iterator[Event]:
        self._texts[delta.number, delta.kind].append(delta.text)
        self._num_tokens[delta.number] += len(delta.tokens)
        return self._text(delta)

    def _rest(self, number: int, choice: Choice) -> Iterator[TextDelta]:
        """Yield the texts of a choice that were not sent."""
        texts: Mapping[Kind, str] = {"reasoning": choice.reasoning, "content": choice.content}
        start = sum(len(text) for kind in texts for text in self._texts[number, kind])
        for kind, text in texts.items():
            sent = "".join(self._texts[number, kind])
            if not text.startswith(sent):
                raise RefusedError(500, RESAMPLED)
            if rest := text[len(sent) :]:
                yield TextDelta(number, kind, start, rest)
                start += len(rest)


def _tokens(choice: Choice) -> Sequence[TokenLogp]:
    # Without requested log-probabilities, there are no texts of tokens.
    return list(zip(choice.pieces, choice.logp, strict=False))


@dataclass(frozen=True)
class Dialect:
    """One HTTP interface.

    path: path of its requests below the address of a session.
    read: function from (body, name of the model, earlier conversations) to a call. Raises RefusedError.
    error: form of an error as a body.
    ping: bytes that keep a connection open while the model samples; clients skip them.
    count_path: path of requests that count the tokens of a prompt, None: there is none. counted: form of their reply.
    """

    path: str
    read: Callable[[Mapping[str, JsonValue], str, Earlier], Call]
    error: Callable[[RefusedError], JsonObject]
    ping: bytes
    count_path: str | None = None
    counted: Callable[[int], JsonObject] = field(default=lambda tokens: {"input_tokens": tokens})


def json_bytes(value: JsonObject) -> bytes:
    """Return compact JSON as UTF-8. Raises: ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
