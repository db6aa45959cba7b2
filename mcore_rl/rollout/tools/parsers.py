"""From the text of an assistant's message to content, reasoning and tool calls.

A call that was not closed, that stands inside reasoning, whose tool is unknown or whose arguments do not fit its schema
is no call: a wrong one becomes a MalformedCall, whose `answer` tells the model what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.functions import FORM, describe, load_function, names_function
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.rollout.tools.formats import FORMATS, THINK_OPEN, Format, RawCall, format_of_template
from mcore_rl.rollout.tools.schemas import ArgumentChecker, Schema, name_of

KEY = "rollout.tool_parser"
AUTO = "auto"
PIECE_CHARACTERS = 256
MAX_STRETCHES = 32
"""Of calls with other text between them, in formats without a closing tag; further calls are content."""


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
    """A call that must not be executed. `name` None: it cannot be read."""

    name: str | None
    text: str
    reason: str
    id: str = ""

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
            content, reasoning, raw = _stretches(self._form, text, prompt)
            return ParsedMessage(content, reasoning, tuple(self._checked(call) for call in raw))
        message = self._by_user(text)
        calls = (
            call if isinstance(call, MalformedCall) else self._accepted(call, repr(call)) for call in message.calls
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
            return MalformedCall(call.name, text, f"there is no such tool; the tools are: {known}", call.id)
        problem = checker.problem(call.arguments)
        return call if problem is None else MalformedCall(call.name, text, problem, call.id)


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


def _parsed(text: str, template: dict[str, Any], prefix: str, piece: int) -> dict[str, Any]:
    """As transformers' parse_response, in pieces: it looks for every tag up to the end of what it has after each call,
    and a model that writes one call over and over until its limit would hold up the engine for seconds."""
    from transformers.utils.chat_parsing import ResponseParser

    parser = ResponseParser(template, prefix=prefix)
    for start in range(0, len(text), max(piece, 1)):
        parser.feed(text[start : start + piece])
    message, _ = parser.finalize()
    return message


def _stretches(form: Format, text: str, prompt: str) -> tuple[str, str, list[RawCall]]:
    """Content, reasoning and calls. A stretch ends where, in a format without closing tags, something that is no call
    follows one."""
    template = form.response_template()
    prefix = "<think>" if re.search(rf"(?:{THINK_OPEN})\s*\Z", prompt) else ""
    content, reasoning, calls = "", [], list[RawCall]()
    for _ in range(MAX_STRETCHES):
        message = _parsed(text, template, prefix, PIECE_CHARACTERS if form.closing is not None else len(text))
        content += message.get("content", "")
        reasoning.append(message.get("reasoning", "").strip())
        text, prefix = "", ""
        for body in message.get("calls", []):
            found, text = form.decode(body)
            calls += found
        if not text:
            break
    content += text
    if form.wrappers is not None:
        content = re.sub(form.wrappers, "", content)
    return content.strip(), "\n".join(filter(None, reasoning)), calls
