"""Reading of an assistant's message while it is sampled."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import regex  # Unlike `re`, it finds partial matches: an end of the text that may become a match.

from mcore_rl.rollout.tools.formats import Format

Kind = Literal["reasoning", "content"]
Part = tuple[Kind, str]


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern)


class TurnReader:
    """Splits a growing message into reasoning and content.

    Returned parts concatenate to a beginning of the texts that parsers.py reads from the whole message, so that nothing
    has to be taken back. Text is kept until it is certain:

    - the end of the text, while it may begin a call, a tag of reasoning, or a wrapper of calls;
    - white space, until other text follows it;
    - everything from the beginning of a call on: only the complete message shows whether it is a call.

    keeps_space: white space before the content stays, unless reasoning precedes it (parsers.split_reasoning).
    """

    def __init__(self, form: Format, prompt: str, *, keeps_space: bool) -> None:
        self._opening, self._close = _compiled(form.opening_or_thought), _compiled(form.think_close)
        self._wrappers = None if form.wrappers is None else _compiled(form.wrappers)
        self._thinks = form.opens_thought(prompt)
        self._keeps_space = keeps_space and not self._thinks
        self._text, self._place = "", 0
        """Message so far, and the end of the text that was read."""
        self._content, self._shown = "", 0
        """Content with wrappers, and its end without a possible wrapper."""
        self._is_call = False
        """True once a call may have begun."""
        self._space = self._thought_space = ""
        """White space at the end of the content, and of the current reasoning."""
        self._has_content = self._has_reasoning = self._thought_has_text = False

    def add(self, text: str) -> list[Part]:
        """Add text, and return what is certain now."""
        self._text += text
        parts = list[Part]()
        while not self._is_call:
            pattern = self._close if self._thinks else self._opening
            match = pattern.search(self._text, self._place, partial=True)
            end = len(self._text) if match is None else match.start()
            part, self._place = self._text[self._place : end], end
            parts += self._reasoning(part) if self._thinks else self._said(part)
            if match is None or match.partial:
                break
            self._place = match.end()
            if self._thinks:
                self._thinks, self._thought_has_text, self._thought_space = False, False, ""
            elif match["thought"]:
                self._thinks, self._keeps_space = True, False
            else:
                self._is_call = True
        return parts

    def _reasoning(self, text: str) -> list[Part]:
        text = self._thought_space + text
        certain = text.rstrip()
        self._thought_space = text[len(certain) :]
        if not certain:
            return []
        if not self._thought_has_text:
            certain = ("\n" if self._has_reasoning else "") + certain.lstrip()
        self._thought_has_text = self._has_reasoning = True
        return [("reasoning", certain)]

    def _said(self, text: str) -> list[Part]:
        text = self._space + self._without_wrappers(text)
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if not certain:
            return []
        if not self._has_content and not self._keeps_space:
            certain = certain.lstrip()
        self._has_content = True
        return [("content", certain)]

    def _without_wrappers(self, text: str) -> str:
        """Add content, and return what follows the content that was returned before."""
        if self._wrappers is None:
            return text
        self._content += text
        found = list[str]()
        while True:
            match = self._wrappers.search(self._content, self._shown, partial=True)
            end = len(self._content) if match is None else match.start()
            found.append(self._content[self._shown : end])
            self._shown = end
            if match is None or match.partial:
                return "".join(found)
            self._shown = match.end()
