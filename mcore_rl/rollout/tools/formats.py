"""Formats in which models write tool calls: beginning, content and end of a call.

A call ends where its own syntax ends: an end tag inside a string argument is text. Only if the call cannot be read, it
ends at the first end tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mcore_rl.rollout.tools.strict_json import DECODER, check_characters, json_value

THINK_OPEN, THINK_CLOSE = r"<think>|\[THINK\]", r"</think>|\[/THINK\]"
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class RawCall:
    """Call as written. `arguments` is None if it cannot be read (see `reason`). `typed` is False if the values are
    texts whose types the tool's schema defines. `id`: the model's id of the call, if any."""

    text: str
    name: str | None = None
    arguments: Mapping[str, object] | None = None
    typed: bool = True
    reason: str = ""
    id: str = ""


class UnreadableError(Exception):
    """A call does not follow its format. `end`: position from which its end tag is searched."""

    def __init__(self, reason: str, end: int, name: str | None = None, call_id: str = "") -> None:
        super().__init__(reason)
        self.reason, self.end, self.name, self.id = reason, end, name, call_id


Body = Callable[[str, int], tuple[list[RawCall], int]]
"""Reader of calls: (text, position after an opening tag) -> (calls without their text, end of the last call)."""
Decoder = Callable[[str, int, int], tuple[list[RawCall], int]]
"""(text, start and end of a match of `opening`) -> (calls, position after them). No calls: the match is content."""


@dataclass(frozen=True)
class Format:
    """Format of tool calls.

    marks: patterns that all occur in chat templates with this format. opening: pattern of the beginning of a call.
    closes: True if calls have an end tag. wrappers: pattern of tags around a group of calls, which are not content.
    think_open, think_close: patterns of the tags around reasoning.
    """

    marks: tuple[str, ...]
    opening: str
    decode: Decoder
    closes: bool = True
    wrappers: str | None = None
    think_open: str = THINK_OPEN
    think_close: str = THINK_CLOSE

    @property
    def opening_or_thought(self) -> str:
        """Pattern of the beginning of a call, or of reasoning, which is its group `thought`."""
        return f"(?P<thought>{self.think_open})|(?:{self.opening})"

    def opens_thought(self, prompt: str) -> bool:
        """Return whether a prompt ends with the beginning of reasoning."""
        return re.search(rf"(?:{self.think_open})\s*+\Z", prompt) is not None


NO_CALLS = Format((), r"(?!)", lambda text, start, end: ([], end))
"""Format whose calls begin nowhere."""


# Possessive quantifiers (*+, ++) never backtrack: malformed text must not take quadratic time.
_BLANKS = re.compile(r"\s*+")


def _behind_blanks(text: str, place: int) -> int:
    match = _BLANKS.match(text, place)
    return place if match is None else match.end()


def _json_at(text: str, start: int, name: str | None = None, call_id: str = "") -> tuple[object, int]:
    """Parse a JSON value and return it with its end. Raises: UnreadableError."""
    end = start
    try:
        value, end = DECODER.raw_decode(text, start)
        check_characters(text[start:end], value)
        return value, end
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:
        problem = str(error)
    raise UnreadableError(f"the call is not valid JSON ({problem})", end, name, call_id)


def _of_object(value: object, end: int) -> RawCall:
    """Read a call written as an object: `name` and `arguments` or `parameters`, possibly inside `function`; arguments
    may be JSON text. Raises: UnreadableError."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("function")) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise UnreadableError('the call is not a JSON object with "name"', end)
    return _with_arguments(name, next((value[key] for key in ARGUMENT_KEYS if key in value), None), end)


def _with_arguments(name: str, arguments: object, end: int, call_id: str = "") -> RawCall:
    if isinstance(arguments, str):
        try:
            arguments = json_value(arguments)
        except ValueError as error:
            raise UnreadableError(f"the call is not valid JSON ({error})", end, name, call_id) from None
    if not isinstance(arguments, dict):
        raise UnreadableError('the call has no JSON object "arguments"', end, name, call_id)
    return RawCall("", name, arguments, id=call_id)


def _closed(tag: str, read: Body) -> Decoder:
    """Build a decoder for calls between an opening and `tag`."""

    def decode(text: str, begin: int, place: int) -> tuple[list[RawCall], int]:
        try:
            calls, end = read(text, place)
            end = _behind_blanks(text, end)
            if not text.startswith(tag, end):
                raise UnreadableError(f"something else than {tag} follows the call", end, calls[-1].name, calls[-1].id)
        except UnreadableError as error:
            # The call cannot be read, so it ends at the first end tag after the fault.
            close = text.find(tag, error.end)
            if close < 0:
                return [RawCall(text[begin:], reason=f"the call is not closed by {tag}")], len(text)
            end = close + len(tag)
            return [RawCall(text[begin:end], error.name, reason=error.reason, id=error.id)], end
        end += len(tag)
        return [replace(call, text=text[begin:end]) for call in calls], end

    return decode


def _hermes(text: str, place: int) -> tuple[list[RawCall], int]:
    """Read an object, several objects, or a list of objects."""
    calls: list[RawCall] = []
    place = _behind_blanks(text, place)
    while not calls or text.startswith("{", place):
        value, end = _json_at(text, place)
        calls += [_of_object(each, end) for each in (value if isinstance(value, list) and value else [value])]
        place = _behind_blanks(text, end)
    return calls, place


_CODER_HEAD = re.compile(r"\s*+<function=(?P<name>[^>\n]+)>")
_CODER_KEY = re.compile(r"\s*+<parameter=(?P<key>[^>\n]+)>\n?")
_CODER_NEXT = re.compile(r"\s*+(?:<parameter=|</function>)")
_CODER_END = re.compile(r"\s*+</function>")
_GLM_HEAD = re.compile(r"\s*+(?P<name>[^\s<]+)")
_GLM_KEY = re.compile(r"\s*+<arg_key>(?P<key>[^<]+)</arg_key>\s*+<arg_value>")
_GLM_NEXT = re.compile(r"\s*+(?:<arg_key>|</tool_call>)")
_GLM_END = re.compile(r"(?=\s*+</tool_call>)")


def _tags(
    text: str, place: int, head: re.Pattern[str], key: re.Pattern[str], close: str, following: re.Pattern[str]
) -> tuple[str, dict[str, str], int]:
    """Read a name and textual arguments. Returns (name, arguments, end).

    A value ends at the first `close` tag that is followed by another argument or the end of the call; earlier tags
    belong to the value. A value without such a tag before the next argument is not closed.

    Raises: UnreadableError.
    """
    start = place
    if (match := head.match(text, place)) is None:
        raise UnreadableError("the call does not begin with the tool's name", start)
    name, place = match["name"].strip(), match.end()
    arguments: dict[str, str] = {}
    key_tag = "<parameter=" if close == "</parameter>" else "<arg_key>"
    while match := key.match(text, place):
        limit = text.find(key_tag, match.end())
        end = text.find(close, match.end(), None if limit < 0 else limit)
        while end >= 0 and following.match(text, end + len(close)) is None:
            if text[end - 1] == "\n":  # on a line of its own, so it ends the value: the next opening tag is missing
                end = -1
                break
            end = text.find(close, end + 1, None if limit < 0 else limit)
        if end < 0:
            raise UnreadableError("a tag of an argument is missing or not closed", start, name)
        if match["key"] in arguments:
            raise UnreadableError(f"argument {match['key']} is given twice", start, name)
        arguments[match["key"]] = text[match.end() : end]
        place = end + len(close)
    return name, arguments, place


def _ended(text: str, place: int, end: re.Pattern[str], start: int, name: str) -> int:
    if (match := end.match(text, place)) is None:
        raise UnreadableError("a tag of an argument is missing or not closed", start, name)
    return match.end()


def _qwen3_coder(text: str, place: int) -> tuple[list[RawCall], int]:
    name, arguments, end = _tags(text, place, _CODER_HEAD, _CODER_KEY, "</parameter>", _CODER_NEXT)
    end = _ended(text, end, _CODER_END, place, name)
    # A value is on separate lines: one newline on each side belongs to the format, further ones to the value.
    values = {key: value.removesuffix("\n") for key, value in arguments.items()}
    return [RawCall("", name, values, typed=False)], end


def _glm45(text: str, place: int) -> tuple[list[RawCall], int]:
    name, arguments, end = _tags(text, place, _GLM_HEAD, _GLM_KEY, "</arg_value>", _GLM_NEXT)
    return [RawCall("", name, arguments, typed=False)], _ended(text, end, _GLM_END, place, name)


_DEEPSEEK = re.compile(r"\s*+(?P<fence>function<｜tool▁sep｜>)?(?P<name>[^<\n]+)(?(fence)\n```json\n|<｜tool▁sep｜>)")
"""Beginning of a call of DeepSeek-V3 and R1 (arguments in a code fence), and of V3.1."""
_FENCE_END = re.compile(r"\s*+```")


def _deepseek(text: str, place: int) -> tuple[list[RawCall], int]:
    if (match := _DEEPSEEK.match(text, place)) is None:
        raise UnreadableError("the call is not a tool's name and its arguments around <｜tool▁sep｜>", place)
    name = match["name"].strip()
    value, end = _json_at(text, _behind_blanks(text, match.end()), name)
    after = end
    if match["fence"]:
        if (fence := _FENCE_END.match(text, end)) is None:
            raise UnreadableError("the code fence of the call is not closed", end, name)
        after = fence.end()
    return [_with_arguments(name, value, end)], after


_KIMI = re.compile(r"\s*+(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*+<\|tool_call_argument_begin\|>")


def _kimi(text: str, place: int) -> tuple[list[RawCall], int]:
    """Read a call whose id contains the tool's name: `functions.look:0`."""
    if (match := _KIMI.match(text, place)) is None:
        problem = "the call is not functions.NAME:NUMBER<|tool_call_argument_begin|> and arguments"
        raise UnreadableError(problem, place)
    value, end = _json_at(text, _behind_blanks(text, match.end()), match["name"], match["id"])
    return [_with_arguments(match["name"], value, end, match["id"])], end


_MISTRAL_HEAD = re.compile(
    r"\s*+(?P<name>[^\[\]{}\s]++)\s*+(?:\[CALL_ID\]\s*+(?P<id>[^\[{\s]*+)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)"
)
_MISTRAL_TAG = "[TOOL_CALLS]"


def _mistral(text: str, begin: int, place: int) -> tuple[list[RawCall], int]:
    """Read the text after [TOOL_CALLS]: a name and an object, or (earlier models) a list of objects. A call has no end
    tag: it ends with the JSON."""
    head = _MISTRAL_HEAD.match(text, place)
    start = head.end() if head else _behind_blanks(text, place)
    name, call_id = (head["name"], head["id"] or "") if head else (None, "")
    try:
        value, end = _json_at(text, start, name, call_id)
        if name is not None:
            return [replace(_with_arguments(name, value, end, call_id), text=text[begin:end])], end
        values = value if isinstance(value, list) and value else [value]
        return [_of_mistral_list(each, text[begin:end], end) for each in values], end
    except UnreadableError as error:
        following = text.find(_MISTRAL_TAG, error.end)
        end = len(text) if following < 0 else following
        return [RawCall(text[begin:end], error.name, reason=error.reason, id=error.id)], end


def _of_mistral_list(value: object, text: str, end: int) -> RawCall:
    try:
        call = _of_object(value, end)
    except UnreadableError as error:
        return RawCall(text, error.name, reason=error.reason)
    given = value.get("id") if isinstance(value, dict) else None
    return replace(call, text=text, id=given if isinstance(given, str) else "")


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_KEYS = r'"(?:type|name|function|parameters|arguments)"\s*+:'
# A call without a tag begins a line or follows a tag; elsewhere, JSON is part of a sentence.
_LLAMA_OPENING = rf"<\|python_tag\|>|(?<![^\n>])[ \t]*+(?=\{{\s*+{_LLAMA_KEYS})"
_LLAMA_BETWEEN = re.compile(rf"\s*+;?+\s*+(?:<\|python_tag\|>\s*+)?(?=\{{\s*+{_LLAMA_KEYS})")
_LLAMA_START = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"(?:name|function)"\s*+:\s*+"[^"]*+"\s*+,\s*+'
    r'"(?:parameters|arguments)"\s*+:'
)
"""Beginning of JSON that is meant as a call, even if the rest is malformed."""


def _llama3(text: str, begin: int, place: int) -> tuple[list[RawCall], int]:
    """Read objects with `name` and `parameters`, optionally separated by semicolons. A call ends with its object."""
    calls: list[RawCall] = []
    end = place
    while between := _LLAMA_BETWEEN.match(text, end):
        found = _llama_call(text, between.end())
        if found is None:
            break
        calls.append(found)
        end = between.end() + len(found.text)
    if not calls and text.startswith(_PYTHON_TAG, begin):
        reason = 'the call is not a JSON object with "name" and "parameters"'
        return [RawCall(text[begin:], reason=reason)], len(text)
    return calls, end


def _llama_call(text: str, place: int) -> RawCall | None:
    """Read one call; None if the text at `place` is not meant as a call."""
    meant = _LLAMA_START.match(text, place) is not None
    try:
        value, end = _json_at(text, place)
        # _LLAMA_BETWEEN has matched an opening brace at this place.
        assert isinstance(value, dict)
        inner = value.get("function")
        if not meant and not any(key in (inner if isinstance(inner, dict) else value) for key in ARGUMENT_KEYS):
            return None
        return replace(_of_object(value, end), text=text[place:end])
    except UnreadableError as error:
        end = error.end if error.end > place else len(text)  # the object was parsed: continue after it
        return RawCall(text[place:end], error.name, reason=error.reason) if meant else None


_HARMONY = re.compile(
    r"functions\.(?P<name>[\w.-]+)(?:<\|channel\|>commentary)?\s*+(?:<\|constrain\|>)?\w*+<\|message\|>\s*+"
)


def _harmony(text: str, begin: int, place: int) -> tuple[list[RawCall], int]:
    """Read a message to a tool, gpt-oss's call. <|call|> ends it and is the model's end token, so it may be absent."""
    name = None
    try:
        if (head := _HARMONY.match(text, place)) is None:
            raise UnreadableError("the call is not to=functions.NAME, <|message|> and arguments", place)
        name = head["name"]
        value, end = _json_at(text, head.end(), name)
        call = _with_arguments(name, value, end)
    except UnreadableError as error:
        return [RawCall(text[begin:], name, reason=error.reason)], len(text)
    end += len("<|call|>") if text.startswith("<|call|>", end) else 0
    return [replace(call, text=text[begin:end])], end


FORMATS = {
    "qwen3_coder": Format((r"<function=",), r"<tool_call>", _closed("</tool_call>", _qwen3_coder)),
    "glm45": Format((r"<arg_key>",), r"<tool_call>", _closed("</tool_call>", _glm45)),
    "deepseek": Format(
        (r"<｜tool▁call▁begin｜>",),
        r"<｜tool▁call▁begin｜>",
        _closed("<｜tool▁call▁end｜>", _deepseek),
        wrappers=r"<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>",
    ),
    "kimi": Format(
        (r"<\|tool_call_argument_begin\|>",),
        r"<\|tool_call_begin\|>",
        _closed("<|tool_call_end|>", _kimi),
        wrappers=r"<\|tool_calls_section_begin\|>|<\|tool_calls_section_end\|>",
    ),
    "mistral": Format((r"\[TOOL_CALLS\]",), r"\[TOOL_CALLS\]", _mistral, closes=False),
    "harmony": Format(
        (r"<\|channel\|>commentary", r"functions\."),
        # The recipient is in the channel, as models write it, or before it, as the chat template does.
        r"(?:<\|channel\|>commentary\s*+)?to=(?=functions)",
        _harmony,
        closes=False,
        wrappers=r"<\|start\|>assistant|<\|channel\|>(?:final|commentary)\s*+<\|message\|>|<\|(?:end|return)\|>",
        think_open=r"<\|channel\|>analysis\s*+<\|message\|>",
        think_close=r"<\|end\|>",
    ),
    "hermes": Format(
        (r"<tool_call>", r"\\?[\"']name\\?[\"']", r"\\?[\"']?arguments\\?[\"']?"),
        r"<tool_call>",
        _closed("</tool_call>", _hermes),
    ),
    "llama3": Format(
        (r"<\|start_header_id\|>|<\|python_tag\|>", r"\\?[\"']parameters\\?[\"']\s*:"),
        _LLAMA_OPENING,
        _llama3,
        closes=False,
    ),
}
"""Formats by their name in rollout.tool_parser, in the order in which `auto` tries them: specific ones first."""


def format_of_template(chat_template: str) -> str | None:
    """Return the name of a chat template's call format, or None if it is unknown."""
    fits = (name for name, form in FORMATS.items() if all(re.search(mark, chat_template) for mark in form.marks))
    return next(fits, None)
