"""Parsing of an assistant's message into content, reasoning and tool calls.

Text inside reasoning is never a call. A call that is not closed, names an unknown tool, or has arguments that do not
match the schema becomes a MalformedCall, whose `answer` describes the error to the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from mcore_rl.config.functions import FORM, describe, load_function, names_function
from mcore_rl.data.json_text import to_plain
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.rollout.tools.formats import FORMATS, NO_CALLS, Format, RawCall, format_of_template
from mcore_rl.rollout.tools.schemas import ArgumentChecker, Schema, name_of
from mcore_rl.rollout.tools.turn_reader import TurnReader

KEY = "rollout.tool_parser"
AUTO = "auto"
MAX_STRETCHES = 32
"""Limit for formats without a closing tag: number of calls separated by text, unreadable calls, and JSON objects that
are no calls. Further ones are treated as content."""


class ParserError(McoreRLError):
    """A user's parser raised an error or did not return a ParsedMessage."""


@dataclass(frozen=True)
class ToolCall:
    """Executable call: the tool exists and the arguments match its schema. `id`: the model's id, to which the answer
    refers; most formats have none."""

    name: str
    arguments: dict[str, object]
    id: str = ""


@dataclass(frozen=True)
class MalformedCall:
    """Call that must not be executed. `name` or `arguments` is None if it cannot be read; `text` is the whole call."""

    name: str | None
    text: str
    reason: str
    id: str = ""
    arguments: dict[str, object] | None = None

    @property
    def answer(self) -> str:
        """Answer for the model instead of a tool's result."""
        called = f"The call of {self.name}" if self.name else "The tool call"
        return f"Error: {called} was not executed: {self.reason}."


@dataclass(frozen=True)
class ParsedMessage:
    """Parsed assistant message; `calls` in the order of writing."""

    content: str
    reasoning: str
    calls: tuple[ToolCall | MalformedCall, ...]


UserParser = Callable[[str, Sequence[Schema]], ParsedMessage]


class ToolCallParser:
    """Parser for the format `spec` (rollout.tool_parser); `auto`: the format of the chat template.

    Raises: ConfigError naming the key, for an unknown format or function, or if no format matches the template.
    """

    def __init__(self, spec: str, chat_template: str | None, schemas: Sequence[Schema]) -> None:
        self._schemas = list(schemas)
        self._checkers = {name_of(schema): ArgumentChecker(schema) for schema in schemas}
        self._user: UserParser | None = load_function(KEY, spec) if names_function(spec) else None
        self.format = spec if self._user else _chosen(spec, chat_template)
        self._form = None if self._user else FORMATS[self.format]

    def parse(self, text: str, prompt: str = "") -> ParsedMessage:
        """Parse a message that was decoded with special tokens (tags may be special tokens) and without its end token.
        `prompt` is the text before it, or its end: a prompt may have opened the reasoning.

        Raises: ParserError.
        """
        if self._form is not None:
            found = _read(self._form, text, prompt)
            return ParsedMessage(found.content.strip(), found.reasoning, tuple(map(self._checked, found.calls)))
        message = self._by_user(text)
        # A user's parser may return NumPy values or tuples, for which JSON schemas have no types.
        calls = (
            call
            if isinstance(call, MalformedCall)
            else self._accepted(replace(call, arguments=cast(dict[str, object], to_plain(call.arguments))), repr(call))
            for call in message.calls
        )
        return ParsedMessage(message.content, message.reasoning, tuple(calls))

    def parse_truncated(self, text: str, prompt: str = "") -> ParsedMessage:
        """Parse a message that a limit has truncated. Its calls are content, since a truncated call may look like a
        complete one."""
        if self._form is None:
            content, reasoning = split_reasoning(text, prompt)
            return ParsedMessage(content, reasoning, ())
        found = _read(replace(self._form, decode=_no_call), text, prompt)
        return ParsedMessage(found.content.strip(), found.reasoning, ())

    def reader(self, prompt: str = "") -> TurnReader | None:
        """Return a reader for a message that is being sampled; None for a user's parser, which needs the whole message.
        `prompt`: as for `parse`."""
        return None if self._form is None else TurnReader(self._form, prompt, keeps_space=False)

    def _by_user(self, text: str) -> ParsedMessage:
        assert self._user is not None
        try:
            message = self._user(text, self._schemas)
        except Exception as error:
            raise ParserError(f"{KEY}={self.format} raised {describe(error)}") from error
        right = isinstance(message, ParsedMessage) and all(
            isinstance(call, MalformedCall)
            or (isinstance(call, ToolCall) and isinstance(call.name, str) and isinstance(call.arguments, dict))
            for call in message.calls
        )
        if not right:
            raise ParserError(f"{KEY}={self.format} must return a ParsedMessage of ToolCall and MalformedCall")
        return message

    def _checked(self, call: RawCall) -> ToolCall | MalformedCall:
        if call.arguments is None or call.name is None:
            return MalformedCall(call.name, call.text, call.reason, call.id)
        checker = self._checkers.get(call.name)
        arguments = dict(call.arguments)
        if checker is not None and not call.typed:
            arguments = checker.typed(arguments)
        return self._accepted(ToolCall(call.name, arguments, call.id), call.text)

    def _accepted(self, call: ToolCall, text: str) -> ToolCall | MalformedCall:
        checker = self._checkers.get(call.name)
        if checker is None:
            known = ", ".join(self._checkers) or "none"
            reason = f"there is no such tool; the tools are: {known}"
            return MalformedCall(call.name, text, reason, call.id, call.arguments)
        problem = checker.problem(call.arguments)
        return call if problem is None else MalformedCall(call.name, text, problem, call.id, call.arguments)


def split_reasoning(text: str, prompt: str = "") -> tuple[str, str]:
    """Return content and reasoning of a message without tools, in which a text that looks like a call is content.
    `prompt`: as for ToolCallParser.parse.

    White space stays as it was written, except between reasoning and content and at the end of a message with
    reasoning.
    """
    found = _read(NO_CALLS, text, prompt)
    if not found.has_thought:
        return found.content, ""
    content = found.content.rstrip()
    return content.lstrip() if found.begins_with_thought else content, found.reasoning


def text_reader(prompt: str = "") -> TurnReader:
    """Return a reader for a message without tools that is being sampled. `prompt`: as for ToolCallParser.parse."""
    return TurnReader(NO_CALLS, prompt, keeps_space=True)


def _chosen(spec: str, chat_template: str | None) -> str:
    if spec in FORMATS:
        return spec
    choices = f"one of {', '.join(FORMATS)}, or {FORM}"
    if spec != AUTO:
        raise ConfigError(f"{KEY}={spec} must be {AUTO}, {choices}")
    name = format_of_template(chat_template) if chat_template is not None else None
    if name is None:
        raise ConfigError(
            f"{KEY}={AUTO}: the tool call format of the tokenizer's chat template is unknown; set {KEY} to {choices}"
        )
    return name


@dataclass
class _Written:
    """Message as it was written. `content` has the white space around it."""

    content: str
    reasoning: str
    calls: list[RawCall]
    has_thought: bool
    begins_with_thought: bool
    """True if reasoning precedes all content except white space."""


def _no_call(text: str, start: int, end: int) -> tuple[list[RawCall], int]:
    """Read the beginning of a call as content; a Decoder."""
    return [], end


def _read(form: Format, text: str, prompt: str) -> _Written:
    """Split a text into content, reasoning and calls, in one pass."""
    opening, close = re.compile(form.opening_or_thought), re.compile(form.think_close)
    content, reasoning, calls = list[str](), list[str](), list[RawCall]()
    thinks = begins = form.opens_thought(prompt)
    place = stretches = 0
    while True:
        if thinks:
            end = close.search(text, place)
            reasoning.append(text[place : end.start() if end else len(text)].strip())
            place, thinks = end.end() if end else len(text), False
        # Without closing tags, every piece of text may hide another call. The limit keeps parsing linear.
        begin = opening.search(text, place) if form.closes or stretches < MAX_STRETCHES else None
        if begin is None:
            content.append(text[place:])
            break
        content.append(text[place : begin.start()])
        if begin["thought"]:
            begins = begins or (not reasoning and not "".join(content).strip())
            place, thinks = begin.end(), True
            continue
        text_between = begin.start() > place or not calls
        found, place = form.decode(text, begin.start(), begin.end())
        stretches += text_between or any(call.arguments is None for call in found)
        calls += found
        if not found:  # the opening is content
            place = begin.end() + 1
            content.append(text[begin.start() : place])
    said = "".join(content)
    if form.wrappers is not None:
        said = re.sub(form.wrappers, "", said)
    return _Written(said, "\n".join(filter(None, reasoning)), calls, bool(reasoning), begins)
