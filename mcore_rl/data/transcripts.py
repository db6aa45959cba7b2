"""Prompts and responses as text, for judge models with their own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mcore_rl.data.tokenizer import PLAIN
from mcore_rl.types import Prompt, TrajectoryBuffers
from mcore_rl.types.stop_strings import first_stop

INCOMPLETE = "\ufffd"
"""Replacement character that decoders write for incomplete characters."""


@dataclass(frozen=True)
class Transcript:
    """A prompt and its response as text without special tokens, as graders receive it."""

    prompt: Prompt
    response: str


class PromptSource(Protocol):
    def __getitem__(self, row: int) -> Prompt: ...


class TextDecoder(Protocol):
    def decode(self, token_ids: Sequence[int], **options: bool) -> str: ...


def transcripts(
    buffers: TrajectoryBuffers,
    prompt_rows: np.ndarray,
    prompts: PromptSource,
    decoder: TextDecoder,
    stop: Sequence[str] = (),
) -> list[Transcript]:
    """Return the transcripts of all trajectories. `stop`: stop strings of the run, unless a row has others.

    Shapes: prompt_rows [B] as in RolloutScalars.
    """
    return [
        Transcript(
            prompt,
            response_text(decoder, response_ids(buffers, row).tolist(), (prompt.sampling or {}).get("stop", stop)),
        )
        for row, prompt_row in zip(range(len(buffers.prompt_tokens)), prompt_rows, strict=True)
        for prompt in [prompts[int(prompt_row)]]
    ]


def response_text(decoder: TextDecoder, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Return the text of a response for graders: without special tokens and without a stop string at the end."""
    text = decoder.decode(token_ids, skip_special_tokens=True)
    kept = text_before_stop(decoder, token_ids, stop)
    if kept is None:
        return text
    ending = decoder.decode(token_ids, **PLAIN)[len(kept) :]
    if text.endswith(ending):  # the stop string contains no special token
        return text[: len(text) - len(ending)]
    return _text_before(decoder, token_ids, kept)


def text_before_stop(decoder: TextDecoder, token_ids: Sequence[int], stop: Sequence[str]) -> str | None:
    """Return the text of a response with special tokens up to the stop string that ended it, None if none did."""
    if not stop or not len(token_ids):
        return None
    plain = decoder.decode(token_ids, **PLAIN)
    # Only a stop string that the last token completes ends the response; earlier ones belong to its text.
    # Without the last token, the text may end with an incomplete character.
    before = decoder.decode(token_ids[:-1], **PLAIN).rstrip(INCOMPLETE)
    found = first_stop(plain, stop, searched=len(before))
    return None if found is None else plain[: found[0]]


def _text_before(decoder: TextDecoder, token_ids: Sequence[int], plain: str) -> str:
    """Return the text without special tokens of the tokens that decode to `plain`, which may end within a token."""
    count = len(token_ids) - 1
    while count and len(decoder.decode(token_ids[:count], **PLAIN)) > len(plain):
        count -= 1
    whole = decoder.decode(token_ids[:count], skip_special_tokens=True)
    if not decoder.decode(token_ids[count : count + 1], skip_special_tokens=True):
        return whole  # the last token is special
    return whole + plain[len(decoder.decode(token_ids[:count], **PLAIN)) :]


def trajectory_ids(buffers: TrajectoryBuffers, row: int) -> np.ndarray:
    """Return the token ids of prompt and response, int32 [S]."""
    return buffers.tokens[buffers.token_offsets[row] : buffers.token_offsets[row + 1]]


def response_ids(buffers: TrajectoryBuffers, row: int) -> np.ndarray:
    """Return the token ids of the response, int32 [T]."""
    return trajectory_ids(buffers, row)[int(buffers.prompt_tokens[row]) :]
