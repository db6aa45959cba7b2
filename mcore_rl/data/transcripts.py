"""What was asked and what was answered, as text: for models that judge with a tokenizer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mcore_rl.types import Prompt, TrajectoryBuffers


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
) -> list[Transcript]:
    """Of all trajectories of the buffers.

    Shapes: prompt_rows [B] as in RolloutScalars.
    """
    return [
        Transcript(
            prompts[int(prompt_row)],
            decoder.decode(response_ids(buffers, row).tolist(), skip_special_tokens=True),
        )
        for row, prompt_row in zip(range(len(buffers.prompt_tokens)), prompt_rows, strict=True)
    ]


def trajectory_ids(buffers: TrajectoryBuffers, row: int) -> np.ndarray:
    """Token ids of prompt and response, int32 [S]."""
    return buffers.tokens[buffers.token_offsets[row] : buffers.token_offsets[row + 1]]


def response_ids(buffers: TrajectoryBuffers, row: int) -> np.ndarray:
    """Token ids of the response, int32 [T]."""
    return trajectory_ids(buffers, row)[int(buffers.prompt_tokens[row]) :]
