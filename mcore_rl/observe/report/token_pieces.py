"""Texts of single tokens, by the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.remote.hub import cached_model_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INCOMPLETE = "\ufffd"
"""Replacement character, which decoders return for an incomplete character."""
LONGEST = 8
"""Tokens that are joined at most until a character is complete; more are invalid bytes."""


class Pieces:
    """Splits responses into the texts of their tokens. `tokenizer` None: a token is shown as <id>."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of_run(cls, config: Mapping[str, object], notes: list[str]) -> Pieces:
        """Load the tokenizer that a flattened configuration names. Without one, a note gives the reason."""
        named = config.get("model.tokenizer_path") or config.get("model.hf_path")
        if not isinstance(named, str):
            return cls(None)
        path = Path(named) if named.endswith(".json") else Path(named) / "tokenizer.json"
        from tokenizers import Tokenizer

        try:
            # Raises OSError for a folder that may not be searched, and for a name that is too long.
            if not path.is_file():
                # A run records hub ids, not the directories of its host's cache.
                path = cached_model_file(named, "tokenizer.json") or path
            if not path.is_file():
                notes.append(f"{path} does not exist: tokens are shown as their numbers")
                return cls(None)
            return cls(Tokenizer.from_file(str(path)))
        # The package raises bare Exceptions.
        except Exception as error:
            notes.append(f"{path} cannot be read, so tokens are shown as their numbers: {error}")
            return cls(None)

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token. A character that needs the bytes of several tokens belongs to the last one."""
        if self._tokenizer is None:
            return [f"<{token}>" for token in token_ids]
        texts, context, start = [], 0, 0
        for end in range(1, len(token_ids) + 1):
            # Decode with the tokens of the text before: a decoder drops the first blank of a text.
            before, text = self._decode(token_ids[context:start]), self._decode(token_ids[context:end])
            incomplete = text.endswith(INCOMPLETE) and end - start < LONGEST and end < len(token_ids)
            texts.append("" if incomplete else text[len(before) :])
            if not incomplete:
                context, start = start, end
        return texts

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
