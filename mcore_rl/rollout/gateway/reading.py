"""Reading of sampled turns into the texts and calls of replies."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rl.data.chat.messages import chat_call
from mcore_rl.data.tokenizer import PLAIN
from mcore_rl.data.transcripts import text_before_stop
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.episodes.session import Sampled, Session
from mcore_rl.rollout.gateway.exchange import ChatRequest, Choice, FinishReason
from mcore_rl.rollout.gateway.formats.texts import split_format
from mcore_rl.rollout.tools.parsers import MalformedCall, ParsedMessage, ToolCallParser, split_reasoning
from mcore_rl.types.chat import ChatCall
from mcore_rl.types.json_format import JsonFormat


def read_choice(
    session: Session,
    request: ChatRequest,
    context: EpisodeContext,
    sampled: Sampled,
    name: str,
    form: JsonFormat | None = None,
) -> Choice:
    """Return a sampled turn as a choice.

    name: prefix of the ids of calls without an id. form: the format.
    """
    content, reasoning, calls = sampled.text, "", list[ChatCall]()
    if form is not None:
        kept = text_before_stop(context.decoder, sampled.token_ids, sampled.stops)
        content, reasoning = split_format(session.written(sampled) if kept is None else kept, form)
    elif request.prompt is None:
        content, reasoning, calls = _read(session, context, sampled)
    pieces = list[str]()
    if request.top_logprobs is not None:
        pieces = [context.decoder.decode([token], skip_special_tokens=False) for token in sampled.token_ids]
    finish: FinishReason = "length" if sampled.finish_reason == "length" else "tool_calls" if calls else "stop"
    made = [
        chat_call(call["function"]["name"], call["function"]["arguments"], call.get("id") or f"call_{name}{number}")
        for number, call in enumerate(calls)
    ]
    stops = request.sampling.get("stop")
    stop = stop_of(context, sampled, stops) if isinstance(stops, list | tuple) and finish == "stop" else None
    return Choice(content, reasoning, made, finish, sampled.token_ids, sampled.logp, pieces, stop)


def stop_of(context: EpisodeContext, sampled: Sampled, stops: Sequence[str]) -> str | None:
    """Return the stop string that ended a turn, if one did."""
    written = context.decoder.decode(sampled.token_ids, **PLAIN)
    return next((stop for stop in stops if stop in written), None)


def _read(session: Session, context: EpisodeContext, sampled: Sampled) -> tuple[str, str, list[ChatCall]]:
    """Return content, reasoning and calls of a turn. A call that cannot be read is part of the content; a truncated
    turn has no calls, since a truncated call may look like a complete one."""
    before = session.text_before(sampled.prompt_end)
    if context.parser is None:
        return *split_reasoning(sampled.text, before), []
    parsed = _parsed(session, context, context.parser, sampled, before)
    texts, calls = [parsed.content], list[ChatCall]()
    for call in parsed.calls:
        if isinstance(call, MalformedCall) and (call.name is None or call.arguments is None):
            texts.append(call.text)
        else:
            calls.append(chat_call(str(call.name), call.arguments or {}, call.id))
    return "\n".join(filter(None, texts)), parsed.reasoning, calls


def _parsed(
    session: Session, context: EpisodeContext, parser: ToolCallParser, sampled: Sampled, before: str
) -> ParsedMessage:
    written = session.written(sampled)
    if sampled.finish_reason == "length":
        return parser.parse_truncated(written, before)
    parsed = parser.parse(written, before)
    # The stop string is no part of a reply, unless it ends a call: some runs stop at the tag that closes calls.
    kept = None if parsed.calls else text_before_stop(context.decoder, sampled.token_ids, sampled.stops)
    return parsed if kept is None else parser.parse(kept, before)
