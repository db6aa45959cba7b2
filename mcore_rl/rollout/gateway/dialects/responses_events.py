"""Events of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from mcore_rl.rollout.gateway.dialects import replies
from mcore_rl.rollout.gateway.dialects.interface import Event, ReplyEvents
from mcore_rl.rollout.gateway.exchange import ChatReply, Choice, RefusedError
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta, TokenLogp
from mcore_rl.types.json import JsonObject, JsonValue

if TYPE_CHECKING:
    from mcore_rl.rollout.gateway.dialects.responses import ResponsesCall


class _OpenItem:
    """Item whose text is being sent. `event`: name of the events of its text."""

    def __init__(self, item: JsonObject, part: JsonObject, event: str) -> None:
        self.item, self.part, self.event = item, part, event
        self.texts: list[str] = []
        """Deltas of the text."""
        self.logps: list[JsonValue] = []

    @property
    def has_logps(self) -> bool:
        return "logprobs" in self.part

    def finished_part(self) -> JsonObject:
        """Return the part with its whole text."""
        return {**self.part, "text": "".join(self.texts)} | ({"logprobs": self.logps} if self.has_logps else {})


class ResponseEvents(ReplyEvents):
    """Reply as events, which are numbered. Every item is added empty, grows by deltas, and is repeated whole when it is
    done:

        response.created, response.in_progress
        response.output_item.added
            response.content_part.added, response.output_text.delta ..., .done, response.content_part.done
        response.output_item.done
        response.completed or response.incomplete
    """

    def __init__(self, call: ResponsesCall) -> None:
        super().__init__()
        self._call = call
        self._numbers = count()
        self._reply_id = ""
        self._items: list[JsonObject] = []
        """Items that are done."""
        self._open: _OpenItem | None = None
        self._tokens: list[TokenLogp] = []
        """Tokens of the reasoning: only events of output_text have log-probabilities, so the next one has them."""

    def error(self, error: RefusedError) -> Event:
        # The event has the fields of the error; OpenAI's client raises it only if they are also in `error`.
        fields: JsonObject = {"code": error.code, "message": str(error), "param": None}
        data: JsonObject = {"type": "error", "sequence_number": next(self._numbers), **fields}
        return Event({**data, **replies.openai_error(error)}, "error")

    def _begin(self, start: ReplyStart) -> Iterator[Event]:
        self._reply_id = start.id
        unfinished: JsonObject = {**self._call.head(start), "status": "in_progress", "output": [], "usage": None}
        yield self._event("created", response=unfinished)
        yield self._event("in_progress", response=unfinished)

    def _text(self, delta: TextDelta) -> Iterator[Event]:
        kind = "message" if delta.kind == "content" else "reasoning"
        if self._open is None or self._open.item["type"] != kind:
            yield from self._close("completed")
            yield from self._added(kind)
        assert self._open is not None
        self._open.texts.append(delta.text)
        self._tokens += delta.tokens
        yield self._delta(delta.text)

    def _end_choice(self, number: int, choice: Choice, tokens: Sequence[TokenLogp]) -> Iterator[Event]:
        calls = list(self._call.call_items(self._reply_id, choice))
        opened = [] if self._open is None else [self._open.item]
        has_message = any(item["type"] == "message" for item in [*self._items, *opened])
        self._tokens += tokens
        is_empty = not calls and not has_message  # an empty turn has an empty message
        # Tokens of reasoning after the last message need another one, which has no text.
        if is_empty or (has_message and self._tokens and not (self._open and self._open.has_logps)):
            yield from self._close("completed" if has_message else self._call.status(choice))
            yield from self._added("message")
        if self._tokens and self._open is not None and self._open.has_logps:
            yield self._delta("")
        yield from self._close("completed" if calls else self._call.status(choice))
        for item in calls:
            place = {"output_index": len(self._items), "item_id": item["id"]}
            begun: JsonObject = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("output_item.added", output_index=len(self._items), item=begun)
            arguments = item["arguments"]
            yield self._event("function_call_arguments.delta", **place, delta=arguments)
            yield self._event("function_call_arguments.done", **place, name=item["name"], arguments=arguments)
            yield self._done(item)

    def _end(self, reply: ChatReply) -> Iterator[Event]:
        finished: JsonObject = {**self._call.body(reply), "output": list(self._items)}
        yield self._event(str(finished["status"]), response=finished)

    def _added(self, kind: str) -> Iterator[Event]:
        """Open an item for a text. A text has several items if the other one interrupts it."""
        earlier = sum(item["type"] == kind for item in self._items)
        name = f"{self._reply_id}_{earlier}" if earlier else self._reply_id
        if kind == "message":
            item, part = self._call.message_item(name), self._call.text_part("", ())
        else:
            item, part = self._call.reasoning_item(name), {"type": "reasoning_text", "text": ""}
        self._open = _OpenItem(item, part, "output_text" if kind == "message" else "reasoning_text")
        begun: JsonObject = {**item, "content": [], "status": "in_progress"}
        yield self._event("output_item.added", output_index=len(self._items), item=begun)
        yield self._event("content_part.added", **self._place(), part=part)

    def _delta(self, text: str) -> Event:
        assert self._open is not None
        fields: JsonObject = {"delta": text}
        if self._open.has_logps:
            # Without requested log-probabilities, there are no tokens.
            logps: list[JsonValue] = list(replies.token_logps(self._tokens))
            self._open.logps += logps
            self._tokens = []
            fields["logprobs"] = logps
        return self._event(f"{self._open.event}.delta", **self._place(), **fields)

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item."""
        if (opened := self._open) is None:
            return
        part = opened.finished_part()
        logps = {"logprobs": part["logprobs"]} if opened.has_logps else {}
        yield self._event(f"{opened.event}.done", **self._place(), text=part["text"], **logps)
        yield self._event("content_part.done", **self._place(), part=part)
        self._open = None
        yield self._done({**opened.item, "content": [part], "status": status})

    def _done(self, item: JsonObject) -> Event:
        self._items.append(item)
        return self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> JsonObject:
        assert self._open is not None
        return {"output_index": len(self._items), "item_id": self._open.item["id"], "content_index": 0}

    def _event(self, kind: str, **fields: JsonValue) -> Event:
        data: JsonObject = {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}
        return Event(data, f"response.{kind}")
