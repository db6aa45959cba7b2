"""Texts of replies with a format: reasoning, and then JSON.

Tags of reasoning and of calls inside of the JSON are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.gateway.exchange import RefusedError
from mcore_rl.rollout.tools.turn_reader import Part
from mcore_rl.types.json_format import JsonFormat

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tags around reasoning."""
CHANNELS = "<|channel|>"
"""Token of chat templates that write reasoning and content in channels."""


def format_of(schema: str, context: EpisodeContext, before: str | None) -> JsonFormat:
    """Return the format of a reply, with the reasoning that the chat format allows before the JSON.

    before: end of the prompt, which may have opened or closed the reasoning; None: a prompt without a chat template.

    Raises: RefusedError for a chat template with channels.
    """
    if before is None:
        return JsonFormat(schema)
    tokenizer = context.conversation.tokenizer
    template = str(tokenizer.chat_template or "")
    if CHANNELS in template:
        raise RefusedError(400, f"the chat template writes replies in channels ({CHANNELS}); leave out the format")
    for tags in TAGS:
        ends = [re.search(rf"{re.escape(tag)}\s*\Z", before) is not None for tag in tags]
        if ends[0]:
            return JsonFormat(schema, tags, in_thought=True)
        if ends[1]:  # the prompt has an empty reasoning
            return JsonFormat(schema)
    for tags in TAGS:
        if any(tag in template or _has_token(context, tag) for tag in tags):
            return JsonFormat(schema, tags)
    return JsonFormat(schema)


def _has_token(context: EpisodeContext, text: str) -> bool:
    tokenizer = context.conversation.tokenizer
    found = tokenizer.convert_tokens_to_ids(text)
    return found is not None and found != tokenizer.unk_token_id


def split_format(text: str, form: JsonFormat) -> tuple[str, str]:
    """Return content and reasoning of a reply. `text`: with special tokens, without the stop token and string."""
    reader = FormatReader(form)
    parts = [*reader.add(text), *reader.end()]
    return _joined(parts, "content"), _joined(parts, "reasoning")


def _joined(parts: Sequence[Part], kind: str) -> str:
    return "".join(text for of, text in parts if of == kind)


class FormatReader:
    """Splits a growing reply with a format into reasoning and content. What it returns is never taken back."""

    def __init__(self, form: JsonFormat) -> None:
        self._form = form
        self._state = "thought" if form.in_thought else "start" if form.thought else "content"
        self._text = ""
        """Text that may be the beginning of a tag."""
        self._space: list[str] = []
        """White space before it, which belongs to the reasoning if other text follows."""
        self._has_text = False
        """True once the current part has text other than white space."""

    def add(self, text: str) -> list[Part]:
        """Add text, and return what is certain now."""
        self._text += text
        parts = list[Part]()
        if self._state == "start":
            self._begin()
        if self._state == "thought":
            parts += self._thought()
        if self._state == "content":
            parts += self._content()
        return parts

    def end(self) -> list[Part]:
        """Return the rest of a reply that has ended."""
        if self._state != "thought":
            return [("content", self._text)] if self._text else []
        rest = self._text.rstrip()
        return [("reasoning", "".join(self._space) + rest if self._has_text else rest)] if rest else []

    def _begin(self) -> None:
        """Decide whether the reply begins with reasoning."""
        assert self._form.thought is not None
        opening, self._text = self._form.thought[0], self._text.lstrip()
        if self._text.startswith(opening):
            self._state, self._text = "thought", self._text[len(opening) :]
        elif not opening.startswith(self._text):
            self._state = "content"

    def _thought(self) -> list[Part]:
        assert self._form.thought is not None
        close = self._form.thought[1]
        place = self._text.find(close)
        ended = place >= 0
        if not ended:
            # The end of the text may be the beginning of the tag.
            most = min(len(close) - 1, len(self._text))
            kept = next((size for size in range(most, 0, -1) if close.startswith(self._text[-size:])), 0)
            place = len(self._text) - kept
        part, self._text = self._text[:place], self._text[place + len(close) if ended else place :]
        certain, parts = part.rstrip(), list[Part]()
        if certain:
            parts.append(("reasoning", "".join(self._space) + certain if self._has_text else certain.lstrip()))
            self._space, self._has_text = [], True
        self._space.append(part[len(certain) :])
        if ended:
            self._state, self._has_text = "content", False
        return parts

    def _content(self) -> list[Part]:
        if self._form.thought is not None and not self._has_text:
            self._text = self._text.lstrip()
        text, self._text = self._text, ""
        self._has_text = self._has_text or bool(text)
        return [("content", text)] if text else []
