"""Stop strings in sampled tokens, found while they are sampled: one implementation for all engines.

The engines run without a tokenizer. Their own search decodes later than they sample (vLLM) or decodes the last tokens
again for every token (SGLang), and both leave the choice of the last token to their detokenizer. This one decides
between two steps, so the token that completes a stop string is the last one of the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_rl.types.stop_strings import first_stop

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""
INCOMPLETE = "\ufffd"
"""Replacement character that decoders write for an incomplete character."""
_CHARACTER_TOKENS = 4
"""A character has at most four bytes, so its last token is at most so many tokens behind its first."""
_UNSETTLED_TOKENS = 2 * _CHARACTER_TOKENS


class StopScanner:
    """Reads the tokens of one response. The work per token does not depend on the length of the response.

    Decoding starts one settled piece before the new token, since a decoder may treat the first token of a text in
    another way than the same token within it.
    """

    def __init__(self, stops: Sequence[str], decode: Decode, token_ids: Sequence[int] = ()) -> None:
        """`token_ids`: tokens that the response has already. A stop string that ends in them is not found any more."""
        self._stops, self._decode = stops, decode
        self._longest = max(map(len, stops))
        self._begin()
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
        new = self._decode(self._window)[len(self._context) :]
        text = self._tail + new.rstrip(INCOMPLETE)
        found = first_stop(text, self._stops, searched=len(self._tail)) is not None
        if not new.endswith(INCOMPLETE):
            self._settle(len(self._window), new)
        elif len(self._window) - self._settled > _UNSETTLED_TOKENS:  # bytes that will never be a character
            count = len(self._window) - _CHARACTER_TOKENS
            self._settle(count, self._decode(self._window[:count])[len(self._context) :])
        return found

    def _begin(self) -> None:
        self._tail = ""
        """The last settled characters, as many as a stop string may share with new ones."""
        self._window: list[int] = []
        self._settled = 0
        """Tokens of the window whose text is settled; they are the context of the others."""
        self._context = ""
        """Their text."""

    def _settle(self, count: int, new: str) -> None:
        """The first `count` tokens of the window are final; `new` is their text after the context."""
        self._tail = (self._tail + new)[-(self._longest - 1) :] if self._longest > 1 else ""
        del self._window[: self._settled]
        self._settled = count - self._settled
        self._context = self._decode(self._window[: self._settled])
