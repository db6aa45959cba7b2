"""Format of messages that a chat template needs, detected by rendering short conversations."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mcore_rl.data.chat.messages import chat_call, kimi_id, nine_characters, same_id, text_of, with_call_ids
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.types.chat import ChatCall, ChatMessage, TextPart, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS = ("mark0here", "mark1here")
_NAME, _KEY, _VALUE = "markedname", "markedkey", "markedvalue"
_LONG_ID, _NINE = "call_0123456789abcdef", "call00000"
_KIMI_MARK = "<|tool_call_argument_begin|>"
_MAX_SEPARATOR = 8
_OPEN_THOUGHT = re.compile(r"\s*+<think>(?P<thought>(?:(?!</think>).)*+)\Z", re.DOTALL)


@dataclass(frozen=True)
class ChatStyle:
    """Renderer for one chat template, with `tools` (OpenAI schemas) and `kwargs` (data.template_kwargs).

    parts: every content is a list of parts.
    separator: text between two text parts.
    developer: role with which developer messages are shown.
    text_arguments: arguments of calls are JSON text.
    null_content: the content of a turn with only tool calls is None.
    short_ids: ids of calls have nine letters or digits.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: tuple[ToolSchema, ...] = ()
    kwargs: Mapping[str, object] | None = None
    parts: bool = False
    separator: str = "\n"
    developer: str = "developer"
    text_arguments: bool = False
    null_content: bool = False
    short_ids: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ToolSchema] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> ChatStyle:
        """Detect the style of the tokenizer's chat template.

        Raises: ConfigError for a template that is not valid Jinja.
        """
        return _with_calls(_with_developer(_with_parts(cls(tokenizer, tuple(tools), dict(kwargs or {})))))

    @property
    def source(self) -> str:
        """Source text of the chat template."""
        return str(self.tokenizer.get_chat_template(tools=[dict(tool) for tool in self.tools] or None))

    def canonical(self, messages: Sequence[ChatMessage], where: str, *, strict: bool = True) -> list[ChatMessage]:
        """Adapt normalized messages to this template: contents are strings, calls have ids, developer roles are mapped.

        Raises: DataError, if `strict`, for a tool message that answers no call.
        """
        made: list[ChatMessage] = [{**message, "content": text_of(message, self.separator)} for message in messages]
        for message in made:
            if message["role"] == "developer":
                message["role"] = self.developer
        new_id = nine_characters if self.short_ids else same_id
        if strict and _KIMI_MARK in self.source:
            new_id = kimi_id
        return with_call_ids(made, where, strict=strict, new_id=new_id)

    def image_text(self) -> str:
        """Return the text that the template writes for a part of type image; "" if it writes none."""
        image: list[TextPart] = [{"type": "text", "text": _MARKS[0]}, {"type": "image"}]  # type: ignore[typeddict-item]
        text = _try_render(replace(self, parts=False), _user([*image, {"type": "text", "text": _MARKS[1]}]))
        found = text.partition(_MARKS[0])[2].partition(_MARKS[1])[0].strip()
        # Some templates print the list as Python or JSON.
        return "" if "type" in found else found

    def render(self, messages: Sequence[ChatMessage], where: str, *, opens_turn: bool, continues: bool = True) -> str:
        """Render canonical messages.

        With `opens_turn` the text ends with the beginning of the model's turn. If the last message is the assistant's
        and it `continues`, it is the beginning of that turn and is left open.

        Raises: DataError for messages that the chat template rejects, or a last message that it cannot leave open.
        """
        if opens_turn and continues and messages and messages[-1]["role"] == "assistant":
            if not is_empty(messages[-1]):
                return self._continued(messages, where)
            messages = messages[:-1]
        return self._apply(messages, where, add_generation_prompt=opens_turn)

    def _continued(self, messages: Sequence[ChatMessage], where: str) -> str:
        last = messages[-1]
        if last.get("tool_calls"):
            raise DataError(
                f"{where}: the last message is an assistant's tool call without an answer; add the tool's message, or "
                "remove the call"
            )
        field, begun = "content", text_of(last)
        thought = _OPEN_THOUGHT.match(begun)
        # Such templates write the tags of the reasoning themselves, so an open thought goes to its own field.
        if "reasoning_content" in self.source and (thought is not None or not begun):
            field = "reasoning_content"
            begun = thought["thought"].strip("\n") if thought is not None else last["reasoning_content"]
            last = {**last, "content": "", "reasoning_content": begun}
        if "prefix" in self.source:
            last = {**last, "prefix": True}  # DeepSeek-V3.1 opens or closes the reasoning depending on it
        text = self._apply([*messages[:-1], last], where, continue_final_message=field)
        if not text.rstrip().endswith(begun.strip()):
            raise DataError(
                f"{where}: the last message begins the assistant's answer, but the chat template cannot leave it open"
            )
        return text

    def _apply(self, messages: Sequence[ChatMessage], where: str, **options: object) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [self._shown(message) for message in messages],
                tools=[dict(tool) for tool in self.tools] or None,
                tokenize=False,
                **options,
                **(self.kwargs or {}),
            )
        except MemoryError:
            raise  # a memory limit, which limits.py reports
        except Exception as error:  # a template may raise anything
            problem = " ".join((str(error) or type(error).__name__).split())
            raise DataError(f"{where}: the tokenizer's chat template rejects the prompt: {problem}") from error
        return str(text)

    def _shown(self, message: ChatMessage) -> dict[str, object]:
        shown = dict(message)
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [self._shown_call(call) for call in calls]
            if self.null_content and not shown["content"]:
                return {**shown, "content": None}
        if self.parts and isinstance(shown["content"], str):
            shown["content"] = [{"type": "text", "text": shown["content"]}]
        return shown

    def _shown_call(self, call: ChatCall) -> dict[str, object]:
        function: dict[str, object] = {**call["function"]}
        if self.text_arguments:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": function}


def opens_thought(content: str) -> bool:
    """Return whether a content begins with unfinished reasoning."""
    return _OPEN_THOUGHT.match(content) is not None


def is_empty(message: ChatMessage) -> bool:
    """Return whether an assistant message has no content, reasoning or call."""
    return not any(message.get(key) for key in ("content", "tool_calls", "reasoning_content"))


def _try_render(style: ChatStyle, *messages: ChatMessage) -> str:
    """Render messages; return "" if the template rejects them."""
    try:
        return style._apply(messages, "probe", add_generation_prompt=True)
    except DataError as error:
        from jinja2 import TemplateSyntaxError

        if isinstance(error.__cause__, TemplateSyntaxError):
            raise ConfigError(
                f"model.tokenizer_path: the tokenizer's chat template is not valid Jinja: line "
                f"{error.__cause__.lineno}: {error.__cause__.message}; correct it, or set data.template=plain"
            ) from error
        return ""


def _user(content: str | list[TextPart]) -> ChatMessage:
    return {"role": "user", "content": content}


def _with_parts(style: ChatStyle) -> ChatStyle:
    first, second = _MARKS
    as_parts: list[TextPart] = [{"type": "text", "text": mark} for mark in _MARKS]
    one_part = _try_render(style, _user(as_parts[:1]))
    printed = any(key in one_part for key in ("'type'", '"type"'))  # the template prints the list as Python or JSON
    parts = first in one_part and not printed and first not in _try_render(style, _user(first))
    text = _try_render(style, _user(as_parts))
    separator = text[text.find(first) + len(first) : max(text.find(second), 0)]
    style = replace(style, parts=parts)
    native = second in text and len(separator) <= _MAX_SEPARATOR
    # The separator is real if a string with it renders to the same text as the two parts.
    if not native or _try_render(style, _user(f"{first}{separator}{second}")) != text:
        separator = "\n"  # vLLM joins parts like this for templates that need strings
    return replace(style, separator=separator)


def _with_developer(style: ChatStyle) -> ChatStyle:
    for role in ("developer", "system"):
        if _MARKS[0] in _try_render(style, {"role": role, "content": _MARKS[0]}, _user(_MARKS[1])):
            return replace(style, developer=role)
    return style


def _with_calls(style: ChatStyle) -> ChatStyle:
    # Try the general format first: the first variant that the template renders correctly is used.
    for call_id, as_text, null_content in itertools.product((_LONG_ID, _NINE), (False, True), (False, True)):
        tried = replace(style, text_arguments=as_text, null_content=null_content, short_ids=call_id == _NINE)
        if _shows_calls(tried, call_id):
            return tried
    return style


def _shows_calls(style: ChatStyle, call_id: str) -> bool:
    calls = [chat_call(_NAME, {_KEY: _VALUE}, call_id)]
    messages: list[ChatMessage] = [_user("?"), {"role": "assistant", "content": "", "tool_calls": calls}]
    answer: ChatMessage = {"role": "tool", "name": _NAME, "tool_call_id": call_id, "content": "!"}
    before = _try_render(style, *messages[:1])
    # Some templates reject the role tool: then look at the call alone.
    text = _try_render(style, *messages, answer) or _try_render(style, *messages)
    quoted_wrongly = f"'{_KEY}'" in text or f'\\"{_KEY}' in text  # repr() of a dict, or JSON encoded twice
    return _NAME in text and _VALUE in text and not quoted_wrongly and text.count("None") == before.count("None")
