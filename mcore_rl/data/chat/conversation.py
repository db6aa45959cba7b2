"""Token ids of multi-turn conversations that only ever append to a sequence.

Sampled tokens are never rendered again: decoding and encoding a text usually gives other tokens. The text that follows
a sampled turn is found by rendering a dummy history whose assistant turn contains a unique mark:

    rendered     <user>?<end>\n<assistant>MARK<end>\n<user>how so?<end>\n<assistant>
    new text                                        \n<user>how so?<end>\n<assistant>

The first stop token after the mark ends the sampled turn; the sequence already contains it if the model sampled it. The
text after it is new. It must not depend on the earlier messages, which `template.examine` checks for the tokenizer.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NotRequired, TypedDict

from mcore_rl.data.chat.messages import call_id, chat_call, message_images, normalized, text_of, with_texts
from mcore_rl.data.chat.style import ChatStyle
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatMessage, ToolSchema, tool_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION: ChatMessage = {"role": "user", "content": "?"}
MODIFIED = "an answer contains a special token, and the chat template modifies the answer"
NOTHING = r"(?!)"
"""Pattern that matches no text."""


class SampledCall(TypedDict):
    """Call of a tool that the model wrote."""

    name: str
    arguments: Mapping[str, object]
    id: NotRequired[str]


class Conversation:
    """Tokeniser of the messages of an episode. Without a chat template, the contents of messages are concatenated.

    tools: OpenAI schemas that the chat template shows.
    stop_ids: tokens that end a response.
    kwargs: data.template_kwargs.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ToolSchema] = (),
        stop_ids: Collection[int] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools)
        self.has_template = tokenizer.chat_template is not None
        self._stops = {str(tokenizer.convert_ids_to_tokens(i)): i for i in stop_ids}
        self._split_tokens = self._tokens_that_plain_text_splits()
        self._style = ChatStyle.of(tokenizer, self.tools, kwargs) if self.has_template else None

    def with_tools(self, tools: Sequence[ToolSchema]) -> Conversation:
        """Return a copy with other tools in its prompts."""
        # Keep the detected format of messages: detecting it renders the template many times.
        other = copy.copy(self)
        other.tools = list(tools)
        if self._style is not None:
            other._style = replace(self._style, tools=tuple(tools))
        return other

    def render(self, messages: Sequence[ChatMessage], *, prompts: bool = True, continues: bool = True) -> str:
        """Render a whole conversation.

        With `prompts` the text ends with the beginning of the model's turn; a last message of the assistant is then
        left open if it `continues`.

        Raises: DataError if the template rejects the messages.
        """
        if self._style is None:
            return "".join(map(text_of, messages))
        shown = self._style.canonical(
            normalized([*map(_without_images, messages)], "messages"), "messages", strict=False
        )
        for made, message in zip(shown, messages, strict=True):
            if message_images(message):
                made["content"] = message["content"]
        return self._style.render(shown, "messages", opens_turn=prompts, continues=continues)

    def prompt_ids(self, messages: Sequence[ChatMessage], *, continues: bool = True) -> list[int]:
        """Return the token ids of a conversation whose next turn is the model's (or `continues` its last message)."""
        return self._encode(self.render(messages, continues=continues))

    def history_ids(self, messages: Sequence[ChatMessage], trusted: int, *, continues: bool = True) -> list[int]:
        """Same as prompt_ids, for a conversation that an episode has continued. Special tokens in texts of tools and
        users stay plain text, except in the first `trusted` messages, which the row has.

        Raises: DataError if the template changed such a text so that it cannot be found in the rendering.
        """
        said = [message["role"] == "assistant" for message in messages]
        trusts = [number < trusted or by_model for number, by_model in enumerate(said)]
        return self._encode_answered(partial(self.render, continues=continues), messages, trusts)

    def ids_after_turn(self, messages: Sequence[ChatMessage], last_id: int) -> list[int]:
        """Return the token ids to append after a sampled turn: the new `messages` and the start of the next model turn.

        `last_id` is the last sampled token. Answers of tools come first in `messages`, one per call of the turn.

        Raises: DataError if the template rejects or drops the messages.
        """
        if not self.has_template:
            return self._encode_answered(self.render, messages)
        stop, _ = self._first_stop(self.text_after_turn([QUESTION], messages))
        # The model may have ended the turn with another stop token (or at the length limit): add the template's token.
        begun = [] if self._stops[stop] == last_id else [self._stops[stop]]
        return begun + self._encode_answered(self._text_after_stop, messages)

    def text_after_turn(
        self, before: Sequence[ChatMessage], messages: Sequence[ChatMessage], *, reasoning: str | None = None
    ) -> str:
        """Render [*before, a dummy model turn, *messages] and return the text after the turn's content.

        Raises: DataError if the template drops the turn.
        """
        # Random, so that no message contains the mark, not even on purpose.
        mark = f"mark{secrets.token_hex(8)}"
        answered = with_answer_ids(messages)
        calls: list[SampledCall] = [
            {"name": each.get("name") or self.some_tool(), "arguments": {"value": "?"}, "id": each["tool_call_id"]}
            for each in answered
            if each["role"] == "tool"
        ]
        # A turn with calls has no content, so its last call contains the mark.
        if calls:
            calls[-1]["arguments"] = {"value": mark}
        text = self.render([*before, self.turn("" if calls else mark, reasoning=reasoning, calls=calls), *answered])
        if text.count(mark) != 1:
            what = "the call of a tool" if calls else "the model's message"
            raise DataError(f"the chat template shows {what} {text.count(mark)} times instead of once")
        return text[text.index(mark) + len(mark) :]

    def _text_after_stop(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text between the stop token of a sampled turn and the next turn."""
        tail = self.text_after_turn([QUESTION], messages)
        stop, place = self._first_stop(tail)
        return tail[place + len(stop) :]

    def turn(self, content: str, *, reasoning: str | None = None, calls: Sequence[SampledCall] = ()) -> ChatMessage:
        """Return a model turn as a message."""
        message: ChatMessage = {"role": "assistant", "content": content}
        if reasoning is not None:
            # Templates read the reasoning from different fields.
            message["reasoning_content"] = message["thinking"] = message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [
                chat_call(call["name"], call["arguments"], call.get("id") or call_id(number))
                for number, call in enumerate(calls)
            ]
        return message

    def some_tool(self) -> str:
        """Return the name of a tool for a dummy call."""
        return tool_name(self.tools[0]) if self.tools else "tool"

    def _first_stop(self, tail: str) -> tuple[str, int]:
        """Return the first stop token in `tail`, which ends the turn, and its position."""
        places = {stop: tail.find(stop) for stop in self._stops}
        there = {stop: place for stop, place in places.items() if place >= 0}
        if not there:
            raise DataError(f"the chat template ends the model's turn with none of {', '.join(self._stops)}")
        stop = min(there, key=lambda stop: there[stop])
        return stop, there[stop]

    def encode(self, text: str) -> list[int]:
        """Tokenise a text in which special tokens are special tokens."""
        return self._encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """Tokenise a text in which special tokens are plain text."""
        return self._encode(text, plain=True)

    def ends_turn_before(self, tail: str, text: str) -> bool:
        """Return whether a stop token ends the model's turn before `text` occurs in a tail."""
        try:
            _, place = self._first_stop(tail)
        except DataError:
            return False
        return place < tail.index(text)

    def _encode(self, text: str, *, plain: bool = False) -> list[int]:
        """Tokenise a text. `plain`: treat special tokens in it as plain text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain, verbose=False)[
            "input_ids"
        ]
        return ids

    def _encode_answered(
        self,
        render: Callable[[Sequence[ChatMessage]], str],
        messages: Sequence[ChatMessage],
        trusts: Sequence[bool] | None = None,
    ) -> list[int]:
        """Tokenise the rendering of messages. Special tokens inside their texts stay plain text, except where `trusts`
        is True.

        Tools and users can therefore not forge a turn, or the place of an image.

        Raises: DataError if the template changed such a text so that it cannot be found in the rendering.
        """
        # Texts with such tokens: with marks instead of the tokens, and as they are. Other characters stay, because
        # templates read the beginning and the end of a text, such as <tool_response>.
        risky = list[tuple[str, str]]()

        def marked(text: str) -> str:
            masked = self._split_tokens.sub(lambda _: f"mark{secrets.token_hex(8)}", text)
            if masked != text:
                risky.append((masked, text))
            return masked

        trusted = [False] * len(messages) if trusts is None else trusts
        with_marks = [
            message if trust else with_texts(message, marked) for message, trust in zip(messages, trusted, strict=True)
        ]
        rendered, ids = render(messages), list[int]()
        # The same text with marks shows where the template's own tokens end: a text may be equal to one of them.
        frame = render(with_marks) if risky else rendered
        for masked, text in risky:
            before, shown, frame = _located(masked, text, frame, rendered)
            ids += self._encode(before) + self._encode(shown, plain=True)
            rendered = rendered[len(before) + len(shown) :]
        if rendered != frame:
            raise DataError(MODIFIED)
        return ids + (self._encode(rendered) if rendered else [])

    def _tokens_that_plain_text_splits(self) -> re.Pattern[str]:
        """Return a pattern for the tokens that `encode_plain` treats as text: special tokens, but no other added
        tokens."""
        tokens = sorted({*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}, key=len, reverse=True)
        split = [token for token in tokens if self._encode(token) != self._encode(token, plain=True)]
        return re.compile("|".join(map(re.escape, split)) or NOTHING)


def _located(masked: str, text: str, frame: str, rendered: str) -> tuple[str, str, str]:
    """Find a text in a rendering, by its copy with marks in the `frame`. Returns the part before it, its form in the
    rendering, and the part of the frame after it.

    Raises: DataError if it has another form.
    """
    for form in _FORMS:
        before, found, after = frame.partition(form(masked))
        if found and rendered.startswith(before + form(text)):
            return before, form(text), after
    raise DataError(MODIFIED)


def _json_ascii(text: str) -> str:
    return json.dumps(text)[1:-1]


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_FORMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.rstrip, str.lstrip, _json_ascii, _json)
"""Forms in which templates show a text: they may strip it or write it as JSON."""


def _without_images(message: ChatMessage) -> ChatMessage:
    return {**message, "content": ""} if message_images(message) else message


def with_answer_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Add call ids to the tool messages, which come first, unless they have ids that the model wrote."""
    return [
        {**message, "tool_call_id": message.get("tool_call_id") or call_id(number)}
        if message["role"] == "tool"
        else message
        for number, message in enumerate(messages)
    ]
