"""Prompt sets: rows of verl's format or plain ones, rendered, tokenised and filtered by length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import Columns
from mcore_rl.data.files import read_rows
from mcore_rl.data.templates import PromptRenderer, encode
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_PER_BLOCK = 1024


@dataclass(frozen=True)
class PromptSet:
    """Tokenised prompts as flat arrays; plain values only, so that it is put in an object store once.

    Shapes: tokens int32 [sum P]; offsets int64 [N + 1]; the lists have N entries.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    texts: list[str]
    data_sources: list[str]
    ground_truths: list[Any]
    extra_infos: list[dict[str, Any]]
    messages: list[list[dict[str, Any]]]

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
        )

    def take(self, rows: Sequence[int] | np.ndarray) -> PromptSet:
        """A set of these rows, in this order, numbered anew from 0."""
        return prompt_set([self[int(row)] for row in rows])


@dataclass(frozen=True)
class LoadReport:
    """What was read from a file. `dropped` rows exceeded a token limit, `truncated` ones did and were shortened to it;
    `limits` says which limit, and how many each. longest_tokens is of the prompts as they were read; `notes` say of how
    many rows what was read otherwise than it is written, or not used."""

    key: str
    path: str
    kept: int
    dropped: int
    longest_tokens: int
    limits: str
    truncated: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.truncated:
            exceeding = f"{self.truncated} truncated ({self.limits})"
        else:
            exceeding = f"{self.dropped} dropped ({self.limits})" if self.dropped else "none dropped"
        read = f"{self.key}: {self.kept} rows from {self.path}, {exceeding}"
        return "; ".join((read, f"longest prompt {self.longest_tokens} tokens", *self.notes))


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig,
    rollout_config: RolloutConfig,
    key: str = "data.train",
    *,
    max_prompts: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[PromptSet, LoadReport]:
    """Reads, renders and tokenises the prompts of a jsonl, parquet or CSV file.

    Prompts above rollout.max_prompt_tokens are dropped or truncated, as data.long_prompts says, and counted. With
    max_prompts, reading ends when so many are kept. `tools` are OpenAI schemas, for the chat template.

    Raises: DataError naming file and row for a malformed row, or `key` for a file without a usable prompt;
    ConfigError for a template that the tokenizer cannot apply.
    """
    renderer, columns = PromptRenderer(tokenizer, data_config, tools), Columns(data_config, key, path)
    limit, truncates = rollout_config.max_prompt_tokens, data_config.long_prompts != "drop"
    kept: list[Prompt] = []
    lengths: list[int] = []
    for block in iterate_blocks(path, key):
        prompts = tokenise_block(block, renderer, columns)
        lengths += [len(prompt.token_ids) for prompt in prompts]
        if truncates:
            prompts = [_truncated(prompt, limit, data_config.long_prompts, tokenizer) for prompt in prompts]
        kept += [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        if max_prompts is not None and len(kept) >= max_prompts:
            break
    if not lengths:
        raise DataError(f"{key}: {path} has no rows; set {key} to a file with prompts")
    if not kept:
        raise DataError(
            f"{key}: all {len(lengths)} prompts of {path} are longer than rollout.max_prompt_tokens={limit}"
            f" ({min(lengths)} to {max(lengths)} tokens); raise rollout.max_prompt_tokens"
        )
    prompts = kept[:max_prompts]
    exceeding = sum(length > limit for length in (lengths[:max_prompts] if truncates else lengths))
    report = LoadReport(
        key,
        str(path),
        kept=len(prompts),
        dropped=0 if truncates else exceeding,
        truncated=exceeding if truncates else 0,
        longest_tokens=max(lengths),
        limits=f"longer than rollout.max_prompt_tokens={limit}",
        notes=columns.notes(),
    )
    return prompt_set(prompts), report


def prompt_set(prompts: Sequence[Prompt]) -> PromptSet:
    """Joins prompts into flat arrays."""
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
    )


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [N + 1]: where each of N consecutive pieces starts, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def iterate_blocks(path: str | Path, key: str) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Rows of a file with their places, many at a time: a tokenizer is fast on blocks."""
    rows = read_rows(path, key)
    while block := list(islice(rows, _ROWS_PER_BLOCK)):
        yield block


def tokenise_block(block: list[tuple[str, dict[str, Any]]], renderer: PromptRenderer, columns: Columns) -> list[Prompt]:
    """Prompts of a block's rows, whatever their length; `row` is -1 until they are part of a set."""
    rows = [columns.read(place, row) for place, row in block]
    texts = [renderer.render(row.messages, row.where) for row in rows]
    ids = encode(renderer.tokenizer, texts, renderer.leading_ids)
    return [
        Prompt(
            row=-1,
            token_ids=token_ids,
            text=text,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            messages=row.messages,
        )
        for row, text, token_ids in zip(rows, texts, ids, strict=True)
    ]


def _truncated(prompt: Prompt, limit: int, how: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt without the tokens beyond `limit`; its text is what the model will see, for the records."""
    if len(prompt.token_ids) <= limit:
        return prompt
    ids = prompt.token_ids[-limit:] if how == "truncate_left" else prompt.token_ids[:limit]
    return replace(prompt, token_ids=ids, text=str(tokenizer.decode(ids.tolist())))
