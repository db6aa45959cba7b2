"""Check that a rendered prompt contains every message: chat templates silently drop roles and fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from mcore_rl.data.chat.messages import REASONING_FIELDS, text_of
from mcore_rl.data.chat.style import ChatStyle, is_empty
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatMessage

REASONING_NOTE = "have reasoning in earlier assistant messages, which the chat template drops"
_SWITCHES = re.compile(r"/(?:no_?think|think)\b")
"""Commands with which users switch reasoning; templates that support them remove them from the text."""


class PresenceCheck:
    """Check of rendered prompts in two ways.

    The text of each message must be in the prompt. In addition, once per shape of a conversation, the contents are
    replaced by unique marks, which must all be in the prompt: this detects a dropped message whose text is part of
    another message. Equal contents get equal marks, which must occur as often.
    """

    def __init__(self, style: ChatStyle) -> None:
        self._style = style
        self._dropped: dict[tuple[bool, tuple[tuple[str, int, int], ...]], int | None] = {}
        """Form and shape of a conversation -> index of the message that the template drops; None: all are shown."""

    def check(self, messages: Sequence[ChatMessage], text: str, where: str, *, opens_turn: bool = True) -> bool:
        """Check a rendering `text`. Returns False if only reasoning of earlier turns is missing, else True.

        opens_turn: the text is a prompt; False: a whole conversation.

        Raises: DataError naming the message that the template drops or changes.
        """
        whole = True
        for number, message in enumerate(messages, start=1):
            content = text_of(message)
            # Templates may drop the reasoning of earlier turns; only the text after it must be present.
            if message["role"] == "assistant" and not _shows(text, content):
                whole = whole and "</think>" not in content
                # Without </think>, rpartition returns the whole content: reasoning that the turn has not finished.
                content = content.rpartition("</think>")[2].removeprefix("<think>")
            lost = next((part for part in _texts(message, content) if not _shows(text, part)), None)
            if lost is not None:
                self._refuse(messages, number - 1, where, f"{_short(lost)} is not in the {_kind(opens_turn)}")
            whole = whole and all(_shows(text, str(message.get(name) or "")) for name in REASONING_FIELDS)
        dropped = self._dropped_message(messages, opens_turn)
        if dropped is not None:
            self._refuse(messages, dropped, where, f"its content is not in the {_kind(opens_turn)}")
        return whole

    def _refuse(self, messages: Sequence[ChatMessage], index: int, where: str, problem: str) -> None:
        raise DataError(
            f"{where}: the tokenizer's chat template drops or changes message {index + 1} (role "
            f"{messages[index]['role']!r}): {problem}; rewrite or remove the row, or use a tokenizer whose chat "
            "template shows such messages"
        )

    def _dropped_message(self, messages: Sequence[ChatMessage], opens_turn: bool) -> int | None:
        numbers: dict[str, int] = {"": 0}
        contents = [numbers.setdefault(text_of(message).strip(), len(numbers)) for message in messages]
        shape = tuple(
            (message["role"], content, len(message.get("tool_calls", ())))
            for message, content in zip(messages, contents, strict=True)
        )
        if (key := (opens_turn, shape)) not in self._dropped:
            self._dropped[key] = self._find_dropped(messages, contents, opens_turn)
        return self._dropped[key]

    def _find_dropped(self, messages: Sequence[ChatMessage], contents: Sequence[int], opens_turn: bool) -> int | None:
        marks = [f"mark{number:05d}z" if number else "" for number in contents]
        marked: list[ChatMessage] = [
            {**message, "content": mark} for message, mark in zip(messages, marks, strict=True)
        ]
        try:
            text = self._style.render(marked, "probe", opens_turn=opens_turn)
        except DataError:
            return None  # the template depends on the contents, which `check` has found
        counts = {mark: marks.count(mark) for mark in marks if mark}
        # A template may drop one of several equal messages: their mark then occurs too rarely.
        lacking = {mark for mark, count in counts.items() if text.count(mark) < count}
        return next((number for number in reversed(range(len(marks))) if marks[number] in lacking), None)


def _texts(message: ChatMessage, content: str) -> Iterator[str]:
    """Yield the texts of a message that must be in the prompt: content, names and arguments of calls."""
    if not is_empty(message) or message["role"] != "assistant":
        yield content
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        yield from _leaves(call["function"]["arguments"])


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value


def _shows(text: str, part: str) -> bool:
    """Return whether a text contains `part`: unchanged, stripped, as JSON, or without reasoning commands."""
    part = part.strip()
    if part in text:
        return True
    if any(json.dumps(part, ensure_ascii=ascii_only)[1:-1] in text for ascii_only in (False, True)):
        return True
    return _SWITCHES.search(part) is not None and all(piece.strip() in text for piece in _SWITCHES.split(part))


def _kind(opens_turn: bool) -> str:
    return "prompt" if opens_turn else "conversation"


def _short(text: str, limit: int = 60) -> str:
    text = text.strip()
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
