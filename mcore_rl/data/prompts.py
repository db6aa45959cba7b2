"""Prompt sets: tokenised prompts as flat arrays, and the report of loading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.data.trajectories import offsets_of
from mcore_rl.types import Prompt, SamplingOverrides
from mcore_rl.types.chat import ChatMessage, ToolSchema
from mcore_rl.types.json import JsonValue


@dataclass(frozen=True)
class PromptSet:
    """Tokenised prompts as flat arrays and plain values, to be stored once in Ray's object store.

    Shapes: tokens int32 [sum P]; offsets int64 [N + 1]; the lists have N entries.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    texts: list[str]
    data_sources: list[str]
    ground_truths: list[JsonValue]
    extra_infos: list[dict[str, object]]
    messages: list[list[ChatMessage]]
    samplings: list[SamplingOverrides | None]
    max_turns: list[int | None]
    tools: list[list[ToolSchema] | None]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a prompt set with {len(self)} rows")
        return Prompt(
            row=int(row),
            token_ids=self.tokens[self.offsets[row] : self.offsets[row + 1]],
            text=self.texts[row],
            data_source=self.data_sources[row],
            ground_truth=self.ground_truths[row],
            extra_info=self.extra_infos[row],
            messages=self.messages[row],
            sampling=self.samplings[row],
            max_turns=self.max_turns[row],
            tools=self.tools[row],
        )

    def take(self, rows: Sequence[int] | np.ndarray) -> PromptSet:
        """Return a set of these rows in this order, renumbered from 0."""
        return prompt_set([self[int(row)] for row in rows])


@dataclass(frozen=True)
class LoadReport:
    """Summary of reading one or more files.

    dropped, truncated: rows above a token limit that were dropped or shortened.
    limits: the exceeded limits, with the number of rows.
    longest_tokens: longest prompt before truncation.
    notes: rows that were converted or partly ignored, with their number.
    of_files: rows kept per file; a set contains the files in order.
    """

    key: str
    path: str
    kept: int
    dropped: int
    longest_tokens: int
    limits: str
    truncated: int = 0
    notes: tuple[str, ...] = ()
    of_files: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.truncated:
            exceeding = f"{self.truncated} truncated ({self.limits})"
        else:
            exceeding = f"{self.dropped} dropped ({self.limits})" if self.dropped else "none dropped"
        read = f"{self.key}: {self.kept} rows from {self.path}, {exceeding}"
        return "; ".join((read, f"longest prompt {self.longest_tokens} tokens", *self.notes))


def prompt_set(prompts: Sequence[Prompt]) -> PromptSet:
    """Join prompts into flat arrays."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    tokens = [prompt.token_ids for prompt in prompts]
    return PromptSet(
        tokens=np.concatenate(tokens).astype(np.int32, copy=False) if tokens else np.empty(0, np.int32),
        offsets=offsets_of(lengths),
        texts=[prompt.text for prompt in prompts],
        data_sources=[prompt.data_source for prompt in prompts],
        ground_truths=[prompt.ground_truth for prompt in prompts],
        extra_infos=[prompt.extra_info for prompt in prompts],
        messages=[prompt.messages for prompt in prompts],
        samplings=[prompt.sampling for prompt in prompts],
        max_turns=[prompt.max_turns for prompt in prompts],
        tools=[prompt.tools for prompt in prompts],
    )


def joined(sets: Sequence[PromptSet]) -> PromptSet:
    """Concatenate several sets."""
    return sets[0] if len(sets) == 1 else prompt_set([each[row] for each in sets for row in range(len(each))])
