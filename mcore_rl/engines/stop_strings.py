"""Detection of stop strings while tokens are sampled, the same for all engines.

The engines run without a tokenizer. Their own detection decodes later than they sample (vLLM) or decodes the last
tokens again for every token (SGLang), and in both the detokenizer decides which token is the last. This implementation
runs between two steps, so the token that completes a stop string is the last token of the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_rl.types.stop_strings import first_stop

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to text, including special tokens."""
INCOMPLETE = "\ufffd"
"""Replacement character that decoders write for an incomplete character."""
_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so it spans at most four tokens."""
_UNSETTLED_TOKENS = 2 * _CHARACTER_TOKENS


class StopScanner:
    """Scans the tokens of one response. The work per token does not depend on the length of the response.

    Text is settled once later tokens cannot change it. Decoding starts one settled piece before the new token, because
    a decoder may treat the first token of a text differently (for example drop its leading space).
    """

    def __init__(self, stops: Sequence[str], decode: Decode, token_ids: Sequence[int] = ()) -> None:
        """`token_ids`: tokens that the response already has. Stop strings that end within them are ignored."""
        self._stops, self._decode = stops, decode
        self._longest = max(map(len, stops))
        self._begin()
        # Scan only the end of the given tokens, and more of them if they have too few characters for the tail.
        count = self._longest + _UNSETTLED_TOKENS
        while token_ids:
            self._begin()
            for token_id in token_ids[-count:]:
                self.add(token_id)
            if count >= len(token_ids) or len(self._tail) >= self._longest - 1:
                break
            count *= 2

    def add(self, token_id: int) -> bool:
        """Read the next token. Returns whether it completes a stop string."""
        self._window.append(token_id)
        # The text after the context may still change while it ends in an incomplete character.
        new = self._decode(self._window)[len(self._context) :]
        text = self._tail + new.rstrip(INCOMPLETE)
        found = first_stop(text, self._stops, searched=len(self._tail)) is not None
        if not new.endswith(INCOMPLETE):
            self._settle(len(self._window), new)
        elif len(self._window) - self._settled > _UNSETTLED_TOKENS:  # invalid bytes, which never become a character
            count = len(self._window) - _CHARACTER_TOKENS
            self._settle(count, self._decode(self._window[:count])[len(self._context) :])
        return found

    def _begin(self) -> None:
        self._tail = ""
        """Last settled characters, as many as a stop string can have before its last character."""
        self._window: list[int] = []
        self._settled = 0
        """Number of leading tokens of the window whose text is settled; they are the context of the others."""
        self._context = ""
        """Text of the settled tokens."""

    def _settle(self, count: int, new: str) -> None:
        """Settle the first `count` tokens of the window. `new` is their text after the context."""
        self._tail = (self._tail + new)[-(self._longest - 1) :] if self._longest > 1 else ""
        del self._window[: self._settled]
        self._settled = count - self._settled
        self._context = self._decode(self._window[: self._settled])
