"""Tokens that may continue one response in its format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xgrammar

from mcore_rl.engines.grammars.vocabulary import Vocabulary
from mcore_rl.errors import DataError


class FormatMatcher:
    """State of one response. It has the methods of vLLM's StructuredOutputGrammar, with which vLLM 0.32 masks the
    logits of every pass before they are sampled, also those after draft tokens.

    begun: tokens that the response already has: a part sampled before an update, or on another engine.

    Raises: DataError if `begun` leaves the format.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, begun: Sequence[int] = ()) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=vocabulary.stop_ids)
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._is_given_up = False
        """True after an end token at a place where nothing may follow."""
        if not self.accept_tokens("", list(begun)):
            raise DataError(f"the response leaves its format at token {len(self._tokens)}, so it cannot be continued")

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Add sampled tokens. Returns False for a token that leaves the format."""
        for token in tokens:
            if self.is_terminated():
                return False
            if not self._matcher.accept_token(token):
                self._is_given_up = token in self._vocabulary.stop_ids and self._may_follow(token)
                if not self._is_given_up:
                    return False
            self._tokens.append(token)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the longest beginning of draft tokens that follows the format."""
        count = 0
        for token in tokens:
            # Bits of the mask, and not the grammar alone: it has rules that the grammar lacks.
            if self.is_terminated() or not self._may_follow(token) or not self.accept_tokens("", [token]):
                break
            count += 1
        self.rollback(count)
        return tokens[:count]

    def rollback(self, num_tokens: int) -> None:
        """Remove the last tokens."""
        if num_tokens:
            if num_tokens > self._is_given_up:
                self._matcher.rollback(num_tokens - self._is_given_up)
            self._is_given_up = False
            del self._tokens[-num_tokens:]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write the tokens that may follow, as bits. Shapes: bitmask int32 [rows, words], on the CPU."""
        self._matcher.fill_next_token_bitmask(bitmask, batch_index)
        refused = self._vocabulary.refused_after(self._tokens[-1]) if self._tokens else None
        if refused is not None:
            bitmask[batch_index] &= ~torch.from_numpy(refused)
        if not bitmask[batch_index].any():
            # No text conforms, for example to a pattern with an empty class. Without any token, sampling would fail for
            # all requests of the pass.
            row = bitmask[batch_index].numpy().view(np.uint32)
            for token in self._vocabulary.stop_ids:
                row[token // 32] |= np.uint32(1 << token % 32)

    def is_terminated(self) -> bool:
        """Return whether the response has its end token."""
        return self._is_given_up or bool(self._matcher.is_terminated())

    def reset(self) -> None:
        """Remove all tokens."""
        self._matcher.reset()
        self._tokens.clear()
        self._is_given_up = False

    def _may_follow(self, token: int) -> bool:
        row = allocate(1, self._vocabulary.vocab_size)
        self.fill_bitmask(row, 0)
        return bool(row[0].numpy().view(np.uint32)[token // 32] >> (token % 32) & 1)


def allocate(rows: int, vocab_size: int) -> torch.Tensor:
    """Return masks that allow every token. Shapes: int32 [rows, words]."""
    masks: torch.Tensor = xgrammar.allocate_token_bitmask(rows, vocab_size)
    return masks
