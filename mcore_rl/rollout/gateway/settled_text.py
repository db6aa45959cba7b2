"""Text of a growing list of tokens, as far as later tokens cannot change it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from mcore_rl.data.transcripts import INCOMPLETE

Decode = Callable[[Sequence[int]], str]
_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so it spans at most four tokens."""
_CONTEXT_TOKENS = 4
"""More tokens than a decoder drops at the beginning of a text."""


class SettledText:
    """Decodes tokens in pieces whose concatenation is the text of all tokens. A token is decoded a limited number of
    times, except for a run of `byte_ids`, which is decoded when it has ended.

    Decoding starts a few tokens before the new ones, because a decoder may treat the first token of a text differently
    (for example drop its leading space).

    byte_ids: tokens for one byte. A decoder reads a run of them at once: if the run is not valid UTF-8, it replaces all
    of its bytes, also characters that were complete before.
    """

    def __init__(self, decode: Decode, byte_ids: Collection[int] = ()) -> None:
        self._decode, self._byte_ids = decode, byte_ids
        self._is_empty: dict[int, bool] = {}
        """True for tokens that have no text, by token: special ones that the decoder skips, and unknown ones."""
        self._window: list[int] = []
        """Last tokens whose text was returned, and those after them. No token without text: nothing depends on it."""
        self._settled = 0
        """Number of leading tokens of the window whose text was returned."""
        self._context = ""
        """Text of these tokens."""

    @property
    def num_unsettled(self) -> int:
        """Number of tokens whose text was not returned yet."""
        return len(self._window) - self._settled

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is settled now."""
        new = [token_id for token_id in token_ids if self._has_text(token_id)]
        self._window += new
        if all(token_id in self._byte_ids for token_id in new):
            return ""
        attempts, whole = 0, ""
        for count in range(len(self._window), self._settled, -1):
            if self._window[count - 1] in self._byte_ids:
                continue
            text = self._decode(self._window[:count])
            if not text.endswith(INCOMPLETE):
                return self._settle(count, text, is_cut=False)
            attempts, whole = attempts + 1, whole or text
            if attempts == _CHARACTER_TOKENS:
                # The other three tokens end the last character, unless its bytes are no character. They may begin one.
                return self._settle(count, text, is_cut=not whole.startswith(text))
        return ""

    def _has_text(self, token_id: int) -> bool:
        if token_id in self._byte_ids:
            return True
        if token_id not in self._is_empty:
            # A space alone may have no text, since it would be at the beginning.
            self._is_empty[token_id] = not self._decode([token_id] * _CONTEXT_TOKENS)
        return not self._is_empty[token_id]

    def _settle(self, count: int, text: str, *, is_cut: bool) -> str:
        """Settle the first `count` tokens of the window, which have this text, and return the new part of it.

        is_cut: the last character ends in later tokens, so it is not returned yet.
        """
        kept = len(text) - is_cut
        new, before = text[len(self._context) : kept], max(0, count - _CONTEXT_TOKENS)
        del self._window[:before]
        self._settled = count - before
        context = self._decode(self._window[: self._settled]) if before else text
        self._context = context[: len(context) - is_cut]
        return new


class _StopString:
    """Search of a stop string in a growing text (Knuth, Morris, Pratt): each character is compared twice at most on
    average."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.num_begun = 0
        """Number of characters at the end of the text that may begin the stop string; all of them at its end."""
        self._shorter = [0, 0]
        """The next shorter end of the text that may begin the stop string, by `num_begun`."""
        for character in stop[1:]:
            self._shorter.append(self._longest(self._shorter[-1], character))

    def add(self, text: str) -> bool:
        """Add text. Returns True at the end of the stop string; nothing may be added after it."""
        for character in text:
            self.num_begun = self._longest(self.num_begun, character)
            if self.num_begun == len(self._stop):
                return True
        return False

    def _longest(self, begun: int, character: str) -> int:
        """Return `num_begun` after the next character."""
        while begun and self._stop[begun] != character:
            begun = self._shorter[begun]
        return begun + (self._stop[begun] == character)


class StopGate:
    """Holds tokens back while their text may belong to a stop string.

    text: with special tokens, which stop strings may contain.
    """

    def __init__(self, stops: Sequence[str], text: SettledText) -> None:
        self._stops, self._text = [_StopString(stop) for stop in stops], text
        self._length = 0
        """Number of characters of the settled text."""
        self._held: deque[tuple[int, int]] = deque()
        """Tokens in their order, each with the length of the settled text when it was added."""
        self._is_found = False
        """True once a stop string is complete. The engine ends the response with the token that completes it."""

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Add tokens, and return those that no stop string can contain any more."""
        passed = list[int]()
        for token_id in token_ids:
            if self._is_found:
                break
            self._add(token_id)
            if not self._is_found and not self._text.num_unsettled:
                end = self._length - max(stop.num_begun for stop in self._stops)
                while self._held and self._held[0][1] <= end:
                    passed.append(self._held.popleft()[0])
        return passed

    def _add(self, token_id: int) -> None:
        new = self._text.add([token_id])
        self._length += len(new)
        self._is_found = any(stop.add(new) for stop in self._stops)
        self._held.append((token_id, self._length))
