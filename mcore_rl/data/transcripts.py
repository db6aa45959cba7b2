"""What was asked and what was answered, as text: for models that judge with a tokenizer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mcore_rl.data.tokenizer import PLAIN
from mcore_rl.types import Prompt, TrajectoryBuffers
from mcore_rl.types.stop_strings import first_stop

INCOMPLETE = "\ufffd"
"""What decoders write for bytes that are no whole character."""


@dataclass(frozen=True)
class Transcript:
    """`response` as graders see it, without special tokens."""

    prompt: Prompt
    response: str


class PromptSource(Protocol):
    def __getitem__(self, row: int) -> Prompt: ...


class TextDecoder(Protocol):
    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...


def transcripts(
    buffers: TrajectoryBuffers,
    prompt_rows: np.ndarray,
    prompts: PromptSource,
    decoder: TextDecoder,
    stop: Sequence[str] = (),
) -> list[Transcript]:
    """Of all trajectories of the buffers. `stop` are the run's stop strings; a row may have others.

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
    """Text of a response for graders: without special tokens and, if the last token completed one of the stop strings,
    up to where that begins."""
    text = decoder.decode(token_ids, skip_special_tokens=True)
    if not stop or not len(token_ids):
        return text
    plain = decoder.decode(token_ids, **PLAIN)
    before = decoder.decode(token_ids[:-1], **PLAIN).rstrip(INCOMPLETE)
    found = first_stop(plain, stop, searched=len(before))
    if found is None:
        return text
    start, _ = found
    if text.endswith(plain[start:]):  # no special token there
        return text[: len(text) - len(plain) + start]
    return _text_before(decoder, token_ids, plain[:start])


def _text_before(decoder: TextDecoder, token_ids: Sequence[int], plain: str) -> str:
    """The text without special tokens of the tokens whose text, with them, is `plain`; the last of them may be a part
    of a token."""
    count = len(token_ids) - 1
    while count and len(decoder.decode(token_ids[:count], **PLAIN)) > len(plain):
        count -= 1
    whole = decoder.decode(token_ids[:count], skip_special_tokens=True)
    if not decoder.decode(token_ids[count : count + 1], skip_special_tokens=True):
        return whole  # it is special
    return whole + plain[len(decoder.decode(token_ids[:count], **PLAIN)) :]


def trajectory_ids(buffers: TrajectoryBuffers, row: int) -> np.ndarray:
    """Token ids of prompt and response, int32 [S]."""
    return buffers.tokens[buffers.token_offsets[row] : buffers.token_offsets[row + 1]]


def response_ids(buffers: TrajectoryBuffers, row: int) -> np.ndarray:
    """Token ids of the response, int32 [T]."""
    return trajectory_ids(buffers, row)[int(buffers.prompt_tokens[row]) :]
