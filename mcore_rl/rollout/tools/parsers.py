"""From the text of an assistant's message to content, reasoning and tool calls.

A call that was not closed, that stands inside reasoning, whose tool is unknown or whose arguments do not fit its schema
is no call: a wrong one becomes a MalformedCall, whose `answer` tells the model what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_rl.config.functions import FORM, describe, load_function, names_function
from mcore_rl.data.json_text import to_plain
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.rollout.tools.formats import FORMATS, THINK_CLOSE, THINK_OPEN, Format, RawCall, format_of_template
from mcore_rl.rollout.tools.schemas import ArgumentChecker, Schema, name_of

KEY = "rollout.tool_parser"
AUTO = "auto"
MAX_STRETCHES = 32
"""Calls with other text between them, unreadable ones and JSON that is no call, in formats without a closing tag;
further ones are content."""


class ParserError(McoreRLError):
    """A user's parser raised, or returned something else than a ParsedMessage."""


@dataclass(frozen=True)
class ToolCall:
    """A call that may be executed: the tool is known and the arguments fit its schema. `id`: the model's own, to which
    the answer refers; in most formats calls have none."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True)
class MalformedCall:
    """A call that must not be executed. `name` or `arguments` None: they cannot be read; `text` is all of the call."""

    name: str | None
    text: str
    reason: str
    id: str = ""
    arguments: dict[str, Any] | None = None

    @property
    def answer(self) -> str:
        """What the model is told in place of a tool's answer."""
        called = f"The call of {self.name}" if self.name else "The tool call"
        return f"Error: {called} was not executed: {self.reason}."


@dataclass(frozen=True)
class ParsedMessage:
    """One assistant message; `calls` in the order in which they were written."""

    content: str
    reasoning: str
    calls: tuple[ToolCall | MalformedCall, ...]


UserParser = Callable[[str, Sequence[Schema]], ParsedMessage]


class ToolCallParser:
    """Reads messages in the format that `spec` (rollout.tool_parser) names; `auto`: in that of the chat template.

    Raises: ConfigError naming the key, for a format or a function that does not exist, or where no format fits.
    """

    def __init__(self, spec: str, chat_template: str | None, schemas: Sequence[Schema]) -> None:
        self._schemas = list(schemas)
        self._checkers = {name_of(schema): ArgumentChecker(schema) for schema in schemas}
        self._user: UserParser | None = load_function(KEY, spec) if names_function(spec) else None
        self.format = spec if self._user else _chosen(spec, chat_template)
        self._form = None if self._user else FORMATS[self.format]

    def parse(self, text: str, prompt: str = "") -> ParsedMessage:
        """Reads a message: decoded with special tokens, which tags may be, and without the token that ended it.
        `prompt` is the text before it, or its end: a prompt may have opened the reasoning.

        Raises: ParserError.
        """
        if self._form is not None:
            content, reasoning, raw = _read(self._form, text, prompt)
            return ParsedMessage(content, reasoning, tuple(self._checked(call) for call in raw))
        message = self._by_user(text)
        calls = (
            call
            if isinstance(call, MalformedCall)
            else self._accepted(replace(call, arguments=to_plain(call.arguments)), repr(call))
            for call in message.calls
        )
        return ParsedMessage(message.content, message.reasoning, tuple(calls))

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


def _chosen(spec: str, chat_template: str | None) -> str:
    if spec in FORMATS:
        return spec
    choices = f"one of {', '.join(FORMATS)}, or {FORM}"
    if spec != AUTO:
        raise ConfigError(f"{KEY}={spec} must be {AUTO}, {choices}")
    name = format_of_template(chat_template) if chat_template is not None else None
    if name is None:
        raise ConfigError(
            f"{KEY}={AUTO}: the tokenizer's chat template writes tool calls in no format known here; set {KEY} to "
            f"{choices}"
        )
    return name


def _read(form: Format, text: str, prompt: str) -> tuple[str, str, list[RawCall]]:
    """Content, reasoning and calls, in one pass over the text."""
    opening, close = re.compile(f"(?P<thought>{THINK_OPEN})|(?:{form.opening})"), re.compile(THINK_CLOSE)
    content, reasoning, calls = list[str](), list[str](), list[RawCall]()
    thinks = re.search(rf"(?:{THINK_OPEN})\s*+\Z", prompt) is not None
    place = stretches = 0
    while True:
        if thinks:
            end = close.search(text, place)
            reasoning.append(text[place : end.start() if end else len(text)].strip())
            place, thinks = end.end() if end else len(text), False
        begin = opening.search(text, place) if form.closes or stretches < MAX_STRETCHES else None
        if begin is None:
            content.append(text[place:])
            break
        content.append(text[place : begin.start()])
        if begin["thought"]:
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
    return said.strip(), "\n".join(filter(None, reasoning)), calls
