"""Reading of an assistant's message while it is sampled."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import regex  # Unlike `re`, it finds partial matches: an end of the text that may become a match.

from mcore_rl.rollout.tools.formats import Format

Kind = Literal["reasoning", "content"]
Part = tuple[Kind, str]


_SPACE = r"[\s\x1c-\x1f]"
"""White space of `re` and `str`, with which whole messages are read: for `regex`, U+001C to U+001F are none."""
_PARTS = regex.compile(rf"(?P<said>[^\s\x1c-\x1f]+)|{_SPACE}*(?:[^\S \t]|[\x1c-\x1f])|[ \t]+")
"""Parts of a text: no white space; white space up to the last of a run that is no blank; blanks."""


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> regex.Pattern[str]:
    """Compile a pattern of a format, which has no `\\s` inside of brackets."""
    return regex.compile(pattern.replace(r"\s", _SPACE))


class _GrowingText:
    """Growing text in which patterns are searched. Only the end that may begin a match is kept.

    A match may have any number of white space, which must not be searched again for each new character. The patterns of
    formats accept a run of white space where they accept its last character, so it is kept in a short form: its last
    character that is no blank, which may begin a line, and one blank after it.
    """

    def __init__(self) -> None:
        self._window, self._place = "", 0
        """End of the text in short form, and the end of what was read of it."""
        self._runs: dict[int, list[str]] = {}
        """White space in pieces, by the place of the character in the window that stands for it."""

    def add(self, text: str) -> None:
        """Append text."""
        short = [self._window[max(0, self._place - 1) : self._place]]  # patterns may look at the character before
        length, runs = len(short[0]), dict[int, list[str]]()
        for part in _PARTS.finditer(self._window, self._place):
            start, kept = part.start(), part.group()
            if part["said"] is None:
                pieces = runs[length] = self._runs.get(start) or [kept[0]]
                for place in range(start + 1, part.end()):  # appended, so that each piece is moved at most twice
                    pieces += self._runs.get(place) or [self._window[place]]
                kept = kept[-1]
            short.append(kept)
            length += len(kept)
        self._place = min(self._place, 1)
        self._window, self._runs = "".join([*short, text]), runs

    def read(self, pattern: regex.Pattern[str]) -> tuple[str, regex.Match[str] | None]:
        """Return the text before the next match, with the match, or None if it is not complete yet."""
        match = pattern.search(self._window, self._place, partial=True)
        end = len(self._window) if match is None else match.start()
        text, self._place = self._text(self._place, end), end
        if match is None or match.partial:
            return text, None
        self._place = match.end()
        return text, match

    def _text(self, start: int, end: int) -> str:
        parts = list[str]()
        for place, pieces in self._runs.items():
            if start <= place < end:
                parts += [self._window[start:place], *pieces]
                start = place + 1
        return "".join([*parts, self._window[start:end]])


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
        self._text, self._content = _GrowingText(), _GrowingText()
        """Message, and its content with wrappers."""
        self._is_call = False
        """True once a call may have begun."""
        self._space, self._thought_space = list[str](), list[str]()
        """White space at the end of the content, and of the current reasoning, in pieces."""
        self._has_content = self._has_reasoning = self._thought_has_text = False

    def add(self, text: str) -> list[Part]:
        """Add text, and return what is certain now."""
        parts = list[Part]()
        if self._is_call:
            return parts
        self._text.add(text)
        while True:
            part, match = self._text.read(self._close if self._thinks else self._opening)
            parts += self._reasoning(part) if self._thinks else self._said(part)
            if match is None:
                return parts
            if self._thinks:
                self._thinks, self._thought_has_text, self._thought_space = False, False, []
            elif match["thought"]:
                self._thinks, self._keeps_space = True, False
            else:
                self._is_call = True
                return parts

    def _reasoning(self, text: str) -> list[Part]:
        certain = text.rstrip()
        if not certain:
            self._thought_space.append(text)
            return []
        space, self._thought_space = self._thought_space, [text[len(certain) :]]
        if self._thought_has_text:
            certain = "".join([*space, certain])
        else:
            certain = ("\n" if self._has_reasoning else "") + certain.lstrip()
        self._thought_has_text = self._has_reasoning = True
        return [("reasoning", certain)]

    def _said(self, text: str) -> list[Part]:
        text = self._without_wrappers(text)
        certain = text.rstrip()
        if not certain:
            self._space.append(text)
            return []
        space, self._space = self._space, [text[len(certain) :]]
        keeps = self._has_content or self._keeps_space
        certain = "".join([*space, certain]) if keeps else certain.lstrip()
        self._has_content = True
        return [("content", certain)]

    def _without_wrappers(self, text: str) -> str:
        """Add content, and return what follows the content that was returned before."""
        if self._wrappers is None:
            return text
        self._content.add(text)
        found = list[str]()
        while True:
            part, match = self._content.read(self._wrappers)
            found.append(part)
            if match is None:
                return "".join(found)
