"""Formats in which models write tool calls: where a call begins and ends, and what stands in it.

transformers' response templates find reasoning, content and calls. The body of a call is decoded here, since theirs
raises at the first mistake, and takes a call that was never closed for one that was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

THINK_OPEN, THINK_CLOSE = r"<think>|\[THINK\]", r"</think>|\[/THINK\]"


@dataclass(frozen=True)
class RawCall:
    """A call as it was written. `arguments` None: it cannot be read, and `reason` says why; `typed` False: their values
    are texts, whose types the tool's schema knows; `id`: what the model called it, if it did."""

    text: str
    name: str | None = None
    arguments: Mapping[str, Any] | None = None
    typed: bool = True
    reason: str = ""
    id: str = ""


Decoder = Callable[[str], tuple[list[RawCall], str]]
"""The body of a region -> its calls, and what stands behind the last one."""


@dataclass(frozen=True)
class Format:
    """`marks`: patterns that a chat template has, all of them, when it writes calls this way; `wrappers`: what stands
    around calls and is no content."""

    marks: tuple[str, ...]
    opening: str
    closing: str | None
    decode: Decoder
    wrappers: str | None = None

    def response_template(self) -> dict[str, Any]:
        """For transformers' parse_response: the bodies of calls as texts, closing tags included."""
        calls: dict[str, Any] = {"open_pattern": self.opening, "repeats": True, "content_args": {"strip": False}}
        if self.closing is not None:
            # Of no width behind the tag, so that a body that has no tag at its end is known as one never closed.
            calls["close_pattern"] = f"(?<={re.escape(self.closing)})"
        return {
            "start_anchor": "\0",
            "fields": {
                "reasoning": {"open_pattern": THINK_OPEN, "close_pattern": THINK_CLOSE, "repeats": True, "join": "\n"},
                "calls": calls,
                "content": {"repeats": True, "join": "", "content_args": {"strip": False}},
            },
        }


def json_value(text: str) -> Any:
    """Raises: ValueError for what is not JSON, NaN and infinities included."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_at(text: str, start: int) -> tuple[Any, int]:
    try:
        return _decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _bad_json(text: str, error: ValueError, name: str | None = None) -> RawCall:
    return RawCall(text, name, reason=f"the call is not valid JSON ({error})")


def _of_object(text: str, value: Any, keys: tuple[str, ...]) -> RawCall:
    """A call written as an object with `name` and one of `keys`."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return RawCall(text, reason='the call is not a JSON object with "name"')
    arguments = next((value[key] for key in keys if key in value), None)
    if not isinstance(arguments, dict):
        return RawCall(text, name, reason=f'the call has no JSON object "{keys[0]}"')
    return RawCall(text, name, arguments)


def _closed(body: str, tag: str, decode: Callable[[str, str], RawCall]) -> tuple[list[RawCall], str]:
    if not body.endswith(tag):
        return [RawCall(body, reason=f"the call is not closed by {tag}")], ""
    return [decode(body, body.removesuffix(tag))], ""


def _hermes(body: str, inner: str) -> RawCall:
    try:
        return _of_object(body, json_value(inner), ("arguments",))
    except ValueError as error:
        return _bad_json(body, error)


def _xml(body: str, inner: str, header: str, argument: str, end: str) -> RawCall:
    """Everything between the tags has to be accounted for: what is left over is a tag that was forgotten."""
    head = re.compile(header).match(inner)
    if head is None:
        return RawCall(body, reason="the call does not begin with the tool's name")
    name, place, pattern = head["name"].strip(), head.end(), re.compile(argument, re.DOTALL)
    arguments: dict[str, str] = {}
    while match := pattern.match(inner, place):
        if match["key"] in arguments:
            return RawCall(body, name, reason=f"argument {match['key']} is given twice")
        arguments[match["key"]] = match["value"]
        place = match.end()
    if re.compile(end).fullmatch(inner, place) is None:
        return RawCall(body, name, reason="a tag of an argument is missing or not closed")
    return RawCall(body, name, arguments, typed=False)


def _qwen3_coder(body: str, inner: str) -> RawCall:
    # A value stands on lines of its own; one newline on either side is the format's, further ones are the value's.
    argument = r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=|</function>).)*?)\n?</parameter>"
    return _xml(body, inner, r"\s*<function=(?P<name>[^>\n]+)>", argument, r"\s*</function>\s*")


def _glm45(body: str, inner: str) -> RawCall:
    argument = (
        r"\s*<arg_key>(?P<key>(?:(?!</?arg_).)+)</arg_key>\s*<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>"
    )
    return _xml(body, inner, r"\s*(?P<name>[^\s<]+)", argument, r"\s*")


_DEEPSEEK = (
    re.compile(r"function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)\n```", re.DOTALL),
    re.compile(r"(?P<name>[^<\n]+)<｜tool▁sep｜>(?P<arguments>.*)", re.DOTALL),
)
"""DeepSeek-V3 and R1; V3.1."""


def _deepseek(body: str, inner: str) -> RawCall:
    match = next((match for form in _DEEPSEEK if (match := form.fullmatch(inner.strip()))), None)
    if match is None:
        return RawCall(body, reason="the call is not a tool's name and its arguments around <｜tool▁sep｜>")
    name = match["name"].strip()
    try:
        value = json_value(match["arguments"])
    except ValueError as error:
        return _bad_json(body, error, name)
    return _of_object(body, {"name": name, "arguments": value}, ("arguments",))


_KIMI = re.compile(
    r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)", re.DOTALL
)


def _kimi(body: str, inner: str) -> RawCall:
    """The id names the tool, and the call: `functions.look:0`."""
    match = _KIMI.fullmatch(inner.strip())
    if match is None:
        return RawCall(body, reason="the call is not functions.NAME:NUMBER<|tool_call_argument_begin|> and arguments")
    try:
        value = json_value(match["arguments"])
    except ValueError as error:
        return replace(_bad_json(body, error, match["name"]), id=match["id"])
    call = _of_object(body, {"name": match["name"], "arguments": value}, ("arguments",))
    return replace(call, id=match["id"])


_MISTRAL_HEAD = re.compile(r"\s*(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?={)")


def _mistral(body: str) -> tuple[list[RawCall], str]:
    """What follows [TOOL_CALLS]: a name and an object, or (in earlier models) a list of objects; its end is the end of
    the JSON."""
    head = _MISTRAL_HEAD.match(body)
    start = head.end() if head else len(body) - len(body.lstrip())
    name = head["name"] if head else None
    try:
        value, end = _json_at(body, start)
    except ValueError as error:
        return [_bad_json(body, error, name)], ""
    if name is not None:
        return [_of_object(body[:end], {"name": name, "arguments": value}, ("arguments",))], body[end:]
    values = value if isinstance(value, list) and value else [None]
    return [_of_object(body[:end], each, ("arguments",)) for each in values], body[end:]


_LLAMA_START = r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:'
_LLAMA_BETWEEN = re.compile(rf"\s*;?\s*(?:<\|python_tag\|>\s*)?(?={_LLAMA_START})")


def _llama3(body: str) -> tuple[list[RawCall], str]:
    """Objects with `name` and `parameters`, one after the other or with a semicolon between them; the end of a call is
    the end of its object."""
    calls: list[RawCall] = []
    place = 0
    while between := _LLAMA_BETWEEN.match(body, place):
        try:
            value, end = _json_at(body, between.end())
        except ValueError as error:
            return [*calls, _bad_json(body[between.end() :], error)], ""
        calls.append(_of_object(body[between.end() : end], value, ("parameters", "arguments")))
        place = end
    if not calls:  # behind <|python_tag|> stands something else
        return [RawCall(body, reason='the call is not a JSON object with "name" and "parameters"')], ""
    return calls, body[place:]


def _tagged(tag: str, decode: Callable[[str, str], RawCall]) -> Decoder:
    return lambda body: _closed(body, tag, decode)


FORMATS = {
    "qwen3_coder": Format((r"<function=",), r"<tool_call>", "</tool_call>", _tagged("</tool_call>", _qwen3_coder)),
    "glm45": Format((r"<arg_key>",), r"<tool_call>", "</tool_call>", _tagged("</tool_call>", _glm45)),
    "deepseek": Format(
        (r"<｜tool▁call▁begin｜>",),
        r"<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _tagged("<｜tool▁call▁end｜>", _deepseek),
        wrappers=r"<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>",
    ),
    "kimi": Format(
        (r"<\|tool_call_argument_begin\|>",),
        r"<\|tool_call_begin\|>",
        "<|tool_call_end|>",
        _tagged("<|tool_call_end|>", _kimi),
        wrappers=r"<\|tool_calls_section_begin\|>|<\|tool_calls_section_end\|>",
    ),
    "mistral": Format((r"\[TOOL_CALLS\]",), r"\[TOOL_CALLS\]", None, _mistral),
    "hermes": Format(
        (r"<tool_call>", r"\\?[\"']name\\?[\"']", r"\\?[\"']?arguments\\?[\"']?"),
        r"<tool_call>",
        "</tool_call>",
        _tagged("</tool_call>", _hermes),
    ),
    "llama3": Format(
        (r"<\|start_header_id\|>|<\|python_tag\|>", r"\\?[\"']parameters\\?[\"']\s*:"),
        rf"<\|python_tag\|>|(?<![^\n>])[ \t]*(?={_LLAMA_START})",
        None,
        _llama3,
    ),
}
"""By the name in rollout.tool_parser; in the order in which `auto` looks for them, the more special ones first."""


def format_of_template(chat_template: str) -> str | None:
    """The name of the format in which a chat template writes calls; None: of none known here."""
    fits = (name for name, form in FORMATS.items() if all(re.search(mark, chat_template) for mark in form.marks))
    return next(fits, None)
