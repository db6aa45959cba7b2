"""The token ids of what is said in a conversation, so that a sequence only ever grows.

What a model sampled is never rendered again: text that is decoded and encoded again has mostly other tokens. What tools
or users say after it is found by one rendering of a made-up history whose assistant turn holds a unique mark:

    rendered     <user>?<end>\n<assistant>MARK<end>\n<user>how so?<end>\n<assistant>
    new text                                        \n<user>how so?<end>\n<assistant>

The first stop token behind the mark ends the sampled turn, and is a token of the sequence already where the model has
sampled it; the new text is what stands behind it. It does not depend on what was said before, which the checks of
`template.examine` prove for the tokenizer at hand.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mcore_rl.data.chat.call_ids import call_id
from mcore_rl.data.chat.messages import normalized
from mcore_rl.data.chat.style import ChatStyle
from mcore_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
ToolSchema = Mapping[str, Any]
QUESTION: Message = {"role": "user", "content": "?"}


class Conversation:
    """`tools` are OpenAI schemas that the chat template shows; `stop_ids` the tokens that end a response; `kwargs`
    are data.template_kwargs. Without a chat template messages are their contents, one after the other."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ToolSchema] = (),
        stop_ids: Collection[int] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools)
        self.has_template = tokenizer.chat_template is not None
        self._stops = {str(tokenizer.convert_ids_to_tokens(i)): i for i in stop_ids}
        self._special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
        self._style = ChatStyle.of(tokenizer, self.tools, kwargs) if self.has_template else None

    def with_tools(self, tools: Sequence[ToolSchema]) -> Conversation:
        """The same conversation with other tools in its prompts."""
        other = copy.copy(self)
        other.tools = list(tools)
        if self._style is not None:
            other._style = replace(self._style, tools=tuple(tools))
        return other

    def render(self, messages: Sequence[Message], *, prompts: bool = True, continues: bool = True) -> str:
        """The text of a whole conversation; with `prompts` the model's turn begins at its end, and a last message of
        the assistant is left open if it `continues`.

        Raises: DataError where the template refuses it.
        """
        if self._style is None:
            return "".join(str(message["content"]) for message in messages)
        shown = self._style.canonical(normalized(messages, "messages"), "messages", strict=False)
        return self._style.render(shown, "messages", opens_turn=prompts, continues=continues)

    def prompt_ids(self, messages: Sequence[Message], *, continues: bool = True) -> list[int]:
        """Token ids of a conversation whose next turn is the model's, or `continues` a last message of it."""
        return self._encode(self.render(messages, continues=continues))

    def ids_after_turn(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Token ids that follow a sampled turn, which ended with `last_id`, when `messages` are said after it and the
        next turn is the model's. Answers of tools come first, as many as the turn had calls.

        Raises: DataError where the template refuses or drops them.
        """
        texts = [str(message["content"]) for message in messages]
        if not self.has_template:
            return self._encode_with("".join(texts), texts)
        tail = self.text_after_turn([QUESTION], messages)
        stop, place = self._first_stop(tail)
        begun = [] if self._stops[stop] == last_id else [self._stops[stop]]
        return begun + self._encode_with(tail[place + len(stop) :], texts)

    def text_after_turn(
        self, before: Sequence[Message], messages: Sequence[Message], *, reasoning: str | None = None
    ) -> str:
        """The text behind a made-up turn of the model, with `messages` after it; the turn follows `before`.

        Raises: DataError where the template drops the turn.
        """
        mark = f"mark{secrets.token_hex(8)}"
        answers = sum(message["role"] == "tool" for message in messages)
        turn = self.turn("" if answers else mark, reasoning=reasoning, calls=self._marked_calls(messages, mark))
        text = self.render([*before, turn, *with_answer_ids(messages)])
        if text.count(mark) != 1:
            what = "the call of a tool" if answers else "what the model said"
            raise DataError(f"the chat template shows {what} {text.count(mark)} times instead of once")
        return text[text.index(mark) + len(mark) :]

    def turn(self, content: str, *, reasoning: str | None = None, calls: Sequence[Message] = ()) -> dict[str, Any]:
        """A turn of the model as a message. `calls` have a name, arguments, and an id where the model has given one."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message |= dict.fromkeys(("reasoning_content", "thinking", "reasoning"), reasoning)
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.get("id") or call_id(number),
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for number, call in enumerate(calls)
            ]
        return message

    def _marked_calls(self, messages: Sequence[Message], mark: str) -> list[dict[str, Any]]:
        """A call for each answer; the last one holds the mark."""
        answers = [message for message in with_answer_ids(messages) if message["role"] == "tool"]
        values = ["?"] * (len(answers) - 1) + [mark]
        return [
            {
                "name": answer.get("name") or self._some_tool(),
                "arguments": {"value": value},
                "id": answer["tool_call_id"],
            }
            for answer, value in zip(answers, values, strict=False)
        ]

    def _some_tool(self) -> str:
        return str(self.tools[0]["function"]["name"]) if self.tools else "tool"

    def _first_stop(self, tail: str) -> tuple[str, int]:
        """The stop token that ends the turn before `tail`, and where it stands."""
        places = {stop: tail.find(stop) for stop in self._stops}
        there = {stop: place for stop, place in places.items() if place >= 0}
        if not there:
            raise DataError(f"the chat template ends the model's turn with none of {', '.join(self._stops)}")
        stop = min(there, key=lambda stop: there[stop])
        return stop, there[stop]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are text."""
        return self._encode(text, plain=True)

    def ends_turn_before(self, tail: str, text: str) -> bool:
        """Whether the model's turn ends, with a stop token, before `text` stands in a tail."""
        try:
            _, place = self._first_stop(tail)
        except DataError:
            return False
        return place < tail.index(text)

    def _encode(self, text: str, *, plain: bool = False) -> list[int]:
        """`plain`: special tokens in the text are text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain, verbose=False)[
            "input_ids"
        ]
        return ids

    def _encode_with(self, text: str, contents: Sequence[str]) -> list[int]:
        """As one text, but where a tool or user wrote a special token: that stays text, so that nobody forges a turn.

        Raises: DataError where the template changed what was said so that it cannot be told from its own text.
        """
        risky = [content for content in contents if any(token in content for token in self._special)]
        ids: list[int] = []
        for content in risky:
            forms = (content, content.strip(), json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
            form = next((form for form in forms if form in text), None)
            if form is None:
                raise DataError("an answer holds a special token, and the chat template changes what it says")
            place = text.index(form)
            ids += self._encode(text[:place]) + self._encode(form, plain=True)
            text = text[place + len(form) :]
        return ids + (self._encode(text) if text else [])


def with_answer_ids(messages: Sequence[Message]) -> list[Message]:
    """Answers of tools, which come first, get the ids of the calls that they answer, unless they have the model's."""
    return [
        {**message, "tool_call_id": message.get("tool_call_id") or call_id(number)}
        if message["role"] == "tool"
        else message
        for number, message in enumerate(messages)
    ]
