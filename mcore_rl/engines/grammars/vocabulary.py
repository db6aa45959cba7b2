"""Bytes of tokens, for grammars over bytes."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.errors import DataError

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

NEEDED = frozenset({0x0A, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5)})
"""Bytes that need a token of their own: every text is then a sequence of tokens, so that no grammar has a dead end."""
SECOND_BYTES = {0xE0: range(0xA0, 0xC0), 0xED: range(0x80, 0xA0), 0xF0: range(0x90, 0xC0), 0xF4: range(0x80, 0x90)}
"""Bytes that may follow a first byte in UTF-8. xgrammar 0.2.8 allows all of 0x80 to 0xBF, and decoders then write
replacement characters."""


class Vocabulary:
    """Tokens of a tokenizer.

    vocab_size: number of the model's logits. stop_ids: tokens that end a response.

    Raises: DataError for a tokenizer without a token for every byte.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_ids: Sequence[int]) -> None:
        import xgrammar

        if not stop_ids:
            raise DataError("the model has no token that ends a response, so formats cannot be enforced")
        self.vocab_size, self.stop_ids = vocab_size, list(stop_ids)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=self.stop_ids)
        self.texts: list[bytes] = [bytes(text) for text in info.decoded_vocab]
        """Bytes of each token; empty for special tokens."""
        self._special: dict[int, bytes] = {}
        for token, added in tokenizer.added_tokens_decoder.items():
            if token < vocab_size:
                text = added.content.encode()
                self.texts[token] = b"" if added.special else text
                if added.special:
                    self._special[token] = text
        self.texts = [text if _is_part_of_utf8(text) else b"" for text in self.texts]
        lacking = NEEDED - {text[0] for text in self.texts if len(text) == 1}
        if info.vocab_type == xgrammar.VocabType.RAW or lacking:
            raise DataError(
                "the tokenizer does not have a token for every byte (byte-level or byte fallback), so formats of "
                "replies cannot be enforced; leave out the format"
            )
        self._infos: dict[frozenset[str], xgrammar.TokenizerInfo] = {}
        self._refused = {first: self._bits_outside(first) for first in SECOND_BYTES}

    def info(self, tags: Collection[str]) -> xgrammar.TokenizerInfo:
        """Return the tokens for a grammar. `tags`: special tokens that may be sampled as text."""
        import xgrammar

        key = frozenset(tags)
        if key in self._infos:  # grammars share the copy of the vocabulary
            return self._infos[key]
        texts = list(self.texts)
        for token, text in self._special.items():
            if text.decode() in tags:
                texts[token] = text
        self._infos[key] = xgrammar.TokenizerInfo(
            texts, xgrammar.VocabType.RAW, vocab_size=self.vocab_size, stop_token_ids=self.stop_ids
        )
        return self._infos[key]

    def refused_after(self, token: int) -> np.ndarray | None:
        """Return the tokens that cannot follow a token in UTF-8, as bits like xgrammar's: int32 [words]. None: any."""
        text = self.texts[token]
        return self._refused.get(text[-1]) if text else None

    def _bits_outside(self, first: int) -> np.ndarray:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, bool)
        allowed = SECOND_BYTES[first]
        bits[: len(self.texts)] = [
            bool(text) and 0x80 <= text[0] < 0xC0 and text[0] not in allowed for text in self.texts
        ]
        return np.packbits(bits, bitorder="little").view("<i4")


def _is_part_of_utf8(text: bytes) -> bool:
    """Return whether a text of UTF-8 can contain these bytes, which may begin and end within a character."""
    begun = len(text) - len(text.lstrip(bytes(range(0x80, 0xC0))))
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text[begun:])
    except UnicodeDecodeError:
        return False
    return begun <= 3
