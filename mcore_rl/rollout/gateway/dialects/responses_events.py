"""Events of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from mcore_rl.rollout.gateway.dialects.interface import Event
from mcore_rl.rollout.gateway.dialects.replies import Delta
from mcore_rl.types.json import JsonObject, JsonValue

_TEXT_EVENTS = {"message": "output_text", "reasoning": "reasoning_text"}


def response_events(
    unfinished: JsonObject, finished: JsonObject, reasoning: Sequence[Delta], content: Sequence[Delta]
) -> Iterator[Event]:
    """Yield the events of a response.

    unfinished, finished: the response before and after sampling. reasoning, content: parts of its texts.

    The events are numbered. Every item is added empty, grows by deltas, and is repeated whole when it is done:

        response.created, response.in_progress
        response.output_item.added
            response.content_part.added, response.output_text.delta ..., .done, response.content_part.done
        response.output_item.done
        response.completed or response.incomplete
    """
    numbers = count()

    def event(kind: str, **fields: JsonValue) -> Event:
        return Event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields}, f"response.{kind}")

    yield event("created", response=unfinished)
    yield event("in_progress", response=unfinished)
    for place, item in enumerate(_objects(finished["output"])):
        yield event("output_item.added", output_index=place, item=_begun(item))
        where: JsonObject = {"output_index": place, "item_id": item["id"]}
        if item["type"] == "function_call":
            yield event("function_call_arguments.delta", **where, delta=item["arguments"])
            yield event("function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
        else:
            (part,) = _objects(item["content"])
            parts = reasoning if item["type"] == "reasoning" else content
            for kind, fields in _part_events(f"{_TEXT_EVENTS[str(item['type'])]}", part, parts):
                yield event(kind, **where, content_index=0, **fields)
        yield event("output_item.done", output_index=place, item=item)
    yield event(str(finished["status"]), response=finished)


def _part_events(name: str, part: JsonObject, deltas: Sequence[Delta]) -> Iterator[tuple[str, JsonObject]]:
    """Yield kinds and fields of the events of one text.

    Only events of output_text have log-probabilities: tokens are assigned to deltas by their ends, and the last delta
    has all remaining tokens.
    """
    logps = part.get("logprobs")
    empty: JsonObject = {**part, "text": ""}
    if logps is not None:
        empty["logprobs"] = []
    yield "content_part.added", {"part": empty}
    sent = 0
    for number, delta in enumerate(deltas, start=1):
        fields: JsonObject = {"delta": delta.text}
        if isinstance(logps, list):
            end = len(logps) if number == len(deltas) else max(sent, delta.end)
            fields["logprobs"], sent = logps[sent:end], end
        yield f"{name}.delta", fields
    yield f"{name}.done", {"text": part["text"]} | ({} if logps is None else {"logprobs": logps})
    yield "content_part.done", {"part": part}


def _begun(item: JsonObject) -> JsonObject:
    """Return an item before its text or arguments."""
    empty: JsonObject = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def _objects(value: JsonValue) -> list[JsonObject]:
    assert isinstance(value, list)
    return [each for each in value if isinstance(each, dict)]
