"""Prompt sets: rows in verl's or a plain format, rendered, tokenised and filtered by length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import format_notes
from mcore_rl.data.sources.paths import Names, find_files, format_files
from mcore_rl.data.tokenised.blocks import BlockTokeniser
from mcore_rl.data.tokenised.cache import Entry, open_cache
from mcore_rl.data.tokenised.reader import tokenised_blocks
from mcore_rl.data.trajectories import offsets_of
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = "tokens"
"""Name of the prompts' token ids in the cache."""


@dataclass(frozen=True)
class PromptSet:
    """Tokenised prompts as flat arrays and plain values, to be stored once in Ray's object store.

    Shapes: tokens int32 [sum P]; offsets int64 [N + 1]; the lists have N entries.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    texts: list[str]
    data_sources: list[str]
    ground_truths: list[Any]
    extra_infos: list[dict[str, Any]]
    messages: list[list[dict[str, Any]]]
    samplings: list[Mapping[str, Any] | None]
    max_turns: list[int | None]
    tools: list[list[Mapping[str, Any]] | None]

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


def load_prompts(
    names: Names,
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig,
    rollout_config: RolloutConfig,
    key: str = "data.train",
    *,
    max_prompts: int | None = None,
    runs_tools: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[PromptSet, LoadReport]:
    """Read, render and tokenise the prompts of all files in `names`, in order.

    Prompts above rollout.max_prompt_tokens are dropped or truncated (data.long_prompts) and counted.

    max_prompts: stop reading after this number of kept prompts.
    runs_tools: whether rows may require episodes with tools.
    tools: OpenAI schemas that the chat template shows.

    Raises: DataError naming file and row for a malformed row, or `key` for files without a usable prompt;
    ConfigError for a template that the tokenizer cannot apply.
    """
    files = find_files(names, key)
    tokeniser = BlockTokeniser(tokenizer, data_config, rollout_config, key, runs_tools, tuple(tools))
    cache = open_cache(files, tokeniser, max_prompts)
    if cache is not None and (entry := cache.load()) is not None:
        return prompts_from_entry(entry), report_from_entry(entry, key, files, cache.notes)
    prompts, report = _read_prompts(files, tokeniser, max_prompts)
    made = prompt_set(prompts)
    if cache is not None:
        cache.save(to_cache_entry(made, report))
    return made, with_notes(report, files, [] if cache is None else cache.notes)


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


def to_cache_entry(prompts: PromptSet, report: LoadReport) -> Entry:
    """Convert a set to a cache entry."""
    columns = {name: getattr(prompts, name) for name in _ROW_COLUMNS}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Entry({TOKENS: (prompts.tokens, prompts.offsets)}, prompts.texts, rows, asdict(report))


def prompts_from_entry(entry: Entry) -> PromptSet:
    """Convert a cache entry to a set."""
    tokens, offsets = entry.ragged[TOKENS]
    columns = {name: [row[name] for row in entry.rows] for name in _ROW_COLUMNS}
    return PromptSet(tokens=tokens, offsets=offsets, texts=entry.texts, **columns)


def report_from_entry(entry: Entry, key: str, files: Sequence[Path], notes: Sequence[str]) -> LoadReport:
    """Restore the report of a cache entry, with the current key and file names."""
    kept = {**entry.report, "key": key, "path": format_files(files)}
    kept |= {name: tuple(kept[name]) for name in ("notes", "of_files")}
    return with_notes(LoadReport(**kept), files, notes)


def with_notes(report: LoadReport, files: Sequence[Path], notes: Sequence[str]) -> LoadReport:
    """Add `notes` and the names of files without a kept row to a report."""
    unused = [path for path, kept in zip(files, report.of_files, strict=True) if not kept]
    return replace(
        report, notes=(*report.notes, *([f"no row kept of {format_files(unused)}"] if unused else []), *notes)
    )


_ROW_COLUMNS = ("data_sources", "ground_truths", "extra_infos", "messages", "samplings", "max_turns", "tools")


def _read_prompts(
    files: Sequence[Path], tokeniser: BlockTokeniser, max_prompts: int | None
) -> tuple[list[Prompt], LoadReport]:
    key, how = tokeniser.key, tokeniser.data_config.long_prompts
    limit, truncates = tokeniser.rollout_config.max_prompt_tokens, how != "drop"
    kept: list[Prompt] = []
    lengths: list[int] = []
    noted: Counter[str] = Counter()
    ignored: dict[str, None] = {}
    of_files = [0] * len(files)
    for block in tokenised_blocks(files, tokeniser):
        noted += block.notes
        ignored |= dict.fromkeys(block.ignored)
        lengths += [len(prompt.token_ids) for prompt in block.prompts]
        prompts = [_truncated(prompt, limit, how, tokeniser.tokenizer) for prompt in block.prompts]
        fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        if max_prompts is not None:
            fitting = fitting[: max_prompts - len(kept)]
        kept += fitting
        of_files[block.file] += len(fitting)
        if len(kept) == max_prompts:
            break
    if not lengths:
        raise DataError(f"{key}: {format_files(files)} has no rows; set {key} to a file with prompts")
    if not kept:
        raise DataError(
            f"{key}: all {len(lengths)} prompts of {format_files(files)} are longer than "
            f"rollout.max_prompt_tokens={limit} ({min(lengths)} to {max(lengths)} tokens); raise "
            "rollout.max_prompt_tokens"
        )
    # With truncation every row is kept, so only the first max_prompts rows count; dropped rows count wherever they are.
    exceeding = sum(length > limit for length in (lengths[:max_prompts] if truncates else lengths))
    report = LoadReport(
        key,
        format_files(files),
        kept=len(kept),
        dropped=0 if truncates else exceeding,
        truncated=exceeding if truncates else 0,
        longest_tokens=max(lengths),
        limits=f"longer than rollout.max_prompt_tokens={limit}",
        notes=format_notes(noted, ignored),
        of_files=tuple(of_files),
    )
    return kept, report


def _truncated(prompt: Prompt, limit: int, how: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Truncate a prompt to `limit` tokens on the side `how`; its text becomes the text of the remaining tokens."""
    if how == "drop" or len(prompt.token_ids) <= limit:
        return prompt
    ids = prompt.token_ids[-limit:] if how == "truncate_left" else prompt.token_ids[:limit]
    return replace(prompt, token_ids=ids, text=str(tokenizer.decode(ids.tolist())))
