"""Text of a growing list of tokens, as far as later tokens cannot change it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mcore_rl.data.transcripts import INCOMPLETE
from mcore_rl.types.stop_strings import first_stop

Decode = Callable[[Sequence[int]], str]
_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so it spans at most four tokens."""


class SettledText:
    """Decodes tokens in pieces whose concatenation is the text of all tokens.

    Decoding starts one piece before the new tokens, because a decoder may treat the first token of a text differently
    (for example drop its leading space).

    byte_ids: tokens for one byte. A decoder reads a run of them at once: if the run is not valid UTF-8, it replaces all
    of its bytes, also characters that were complete before.
    """

    def __init__(self, decode: Decode, byte_ids: Collection[int] = ()) -> None:
        self._decode, self._byte_ids = decode, byte_ids
        self._window: list[int] = []
        """Tokens of the last piece with text, and those after it."""
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
        self._window += token_ids
        attempts = 0
        for count in range(len(self._window), self._settled, -1):
            if self._window[count - 1] in self._byte_ids:
                continue
            text = self._decode(self._window[:count])
            if not text.endswith(INCOMPLETE):
                return self._settle(count, text)
            attempts += 1
            if attempts == _CHARACTER_TOKENS:  # bytes that are not UTF-8; later tokens end them
                break
        return ""

    def _settle(self, count: int, text: str) -> str:
        new, piece = text[len(self._context) :], self._decode(self._window[self._settled : count])
        if piece:  # special tokens may have no text
            del self._window[: self._settled]
            self._settled, self._context = count - self._settled, piece
        else:
            self._settled, self._context = count, text
        return new


class StopGate:
    """Holds tokens back while their text may belong to a stop string.

    text: with special tokens, which stop strings may contain.
    """

    def __init__(self, stops: Sequence[str], text: SettledText) -> None:
        self._stops, self._text = stops, text
        self._longest = max(map(len, stops))
        self._tail = ""
        """Last settled characters, at least as many as the beginning of a stop string can have."""
        self._held: list[tuple[int, int]] = []
        """Tokens in their order, each with the number of characters from its end to the end of the settled text."""
        self._is_found = False

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Add tokens, and return those that no stop string can contain any more."""
        passed = list[int]()
        for token_id in token_ids:
            passed += self._add(token_id)
        return passed

    def _add(self, token_id: int) -> list[int]:
        new = self._text.add([token_id])
        text = self._tail + new
        # The engine ends the response with the token that completes a stop string.
        self._is_found = self._is_found or first_stop(text, self._stops, searched=len(self._tail)) is not None
        self._held = [(token, behind + len(new)) for token, behind in self._held]
        self._held.append((token_id, 0))
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        if self._is_found or self._text.num_unsettled:
            return []
        begun = max(
            (n for stop in self._stops for n in range(1, len(stop)) if self._tail.endswith(stop[:n])), default=0
        )
        count = sum(1 for _, behind in self._held if behind >= begun)
        passed = [token for token, _ in self._held[:count]]
        del self._held[:count]
        return passed
