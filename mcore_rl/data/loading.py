"""Loading of prompt sets: rows in verl's or a plain format, rendered, tokenised and filtered by length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import format_notes
from mcore_rl.data.prompts import LoadReport, PromptSet, SupervisedSet, prompt_set
from mcore_rl.data.sources.paths import Names, find_files, format_files
from mcore_rl.data.tokenised.blocks import BlockTokeniser
from mcore_rl.data.tokenised.cache import open_cache
from mcore_rl.data.tokenised.reader import tokenised_blocks
from mcore_rl.data.trajectories import offsets_of
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.types import Prompt
from mcore_rl.types.chat import ToolSchema
from mcore_rl.vision.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HINT_LIMIT = "data.max_hinted_tokens"
_NO_TARGET = np.empty(0, np.int32)


def hinted_limit(data_config: DataConfig, rollout_config: RolloutConfig) -> int:
    """Return the maximum length of a prompt with its hint. Units: tokens."""
    return data_config.max_hinted_tokens or rollout_config.max_prompt_tokens


def load_prompts(
    names: Names,
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig,
    rollout_config: RolloutConfig,
    key: str = "data.train",
    *,
    max_prompts: int | None = None,
    runs_tools: bool = False,
    tools: Sequence[ToolSchema] = (),
    images: ImageProcessor | None = None,
) -> tuple[PromptSet, LoadReport]:
    """Read, render and tokenise the prompts of all files in `names`, in order.

    Prompts above rollout.max_prompt_tokens are dropped or truncated (data.long_prompts) and counted.

    max_prompts: stop reading after this number of kept prompts.
    runs_tools: whether rows may require episodes with tools.
    tools: OpenAI schemas that the chat template shows.
    images: image processor of a model that reads images.

    Raises: DataError naming file and row for a malformed row, or `key` for files without a usable prompt;
    ConfigError for a template that the tokenizer cannot apply.
    """
    tokeniser = BlockTokeniser(tokenizer, data_config, rollout_config, key, runs_tools, tuple(tools), images=images)
    rows, report = _load(names, tokeniser, max_prompts)
    return rows.prompts, report


def load_supervised(
    names: Names,
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig,
    rollout_config: RolloutConfig,
    key: str = "data.train",
    images: ImageProcessor | None = None,
) -> tuple[SupervisedSet, LoadReport]:
    """Read prompts and targets (column data.answer_key) of all files in `names`.

    Rows whose prompt exceeds rollout.max_prompt_tokens, or whose target with its end-of-sequence token exceeds
    rollout.max_response_tokens, are dropped and counted.

    Raises: DataError naming file and row for a malformed row, or `key` for files without a usable row; ConfigError
    if data.long_prompts requests truncation.
    """
    if data_config.long_prompts != "drop":
        raise ConfigError(
            f"data.long_prompts={data_config.long_prompts}: the target of a row does not fit its truncated prompt; "
            "set data.long_prompts=drop for supervised training"
        )
    return _load(names, BlockTokeniser(tokenizer, data_config, rollout_config, key, with_targets=True, images=images))


def _load(names: Names, tokeniser: BlockTokeniser, max_prompts: int | None = None) -> tuple[SupervisedSet, LoadReport]:
    """Load a set from the cache or from its files. Without targets, their arrays are empty."""
    files = find_files(names, tokeniser.key)
    cache = open_cache(files, tokeniser, max_prompts)
    cached = None if cache is None else cache.load()
    rows, report = _read(files, tokeniser, max_prompts) if cached is None else cached
    if cache is not None and cached is None:
        cache.save(rows, report)
    notes = [*report.notes, *([] if cache is None else cache.notes)]
    if unused := [path for path, kept in zip(files, report.of_files, strict=True) if not kept]:
        notes.insert(len(report.notes), f"no row kept of {format_files(unused)}")
    rows = replace(rows, images=tokeniser.images)
    # The files of a cache entry may have had other names.
    return rows, replace(report, key=tokeniser.key, path=format_files(files), notes=tuple(notes))


def _read(
    files: Sequence[Path], tokeniser: BlockTokeniser, max_prompts: int | None
) -> tuple[SupervisedSet, LoadReport]:
    limits, how, path = tokeniser.rollout_config, tokeniser.data_config.long_prompts, format_files(files)
    limit, hint_limit = limits.max_prompt_tokens, hinted_limit(tokeniser.data_config, limits)
    kept: list[tuple[Prompt, np.ndarray]] = []
    lengths: list[int] = []
    too_long_with_hint = 0
    longest_target = 0
    noted: Counter[str] = Counter()
    ignored: dict[str, None] = {}
    of_files = [0] * len(files)
    for block in tokenised_blocks(files, tokeniser):
        noted += block.notes
        ignored |= dict.fromkeys(block.ignored)
        lengths += [len(prompt.token_ids) for prompt in block.prompts]
        longest_target = max([longest_target, *map(len, block.targets)])
        prompts = [_truncated(prompt, limit, how, tokeniser.tokenizer) for prompt in block.prompts]
        rows = zip(prompts, block.targets or [_NO_TARGET] * len(prompts), strict=True)
        fitting = [row for row in rows if len(row[0].token_ids) <= limit and len(row[1]) <= limits.max_response_tokens]
        if tokeniser.reads_hints:
            hinted = [row for row in fitting if row[0].hint_ids is None or len(row[0].hint_ids) <= hint_limit]
            too_long_with_hint += len(fitting) - len(hinted)
            fitting = hinted
        if max_prompts is not None:
            fitting = fitting[: max_prompts - len(kept)]
        kept += fitting
        of_files[block.file] += len(fitting)
        # Leaving the loop closes the iterator, which ends the tokenising processes.
        if len(kept) == max_prompts:
            break
    # With truncation every row is kept, so only the first max_prompts rows count; dropped rows count wherever they are.
    exceeding = sum(length > limit for length in (lengths if how == "drop" else lengths[:max_prompts]))
    dropped, exceeded = (exceeding if how == "drop" else 0), f"longer than rollout.max_prompt_tokens={limit}"
    if tokeniser.with_targets:
        dropped = len(lengths) - len(kept)
        exceeded = (
            f"{exceeding} prompts {exceeded}, {dropped - exceeding} targets longer than"
            f" rollout.max_response_tokens={limits.max_response_tokens}"
        )
    if too_long_with_hint:
        dropped += too_long_with_hint
        exceeded += f", {too_long_with_hint} longer with the hint than {HINT_LIMIT}={hint_limit}"
    if not kept:
        raise _nothing_kept(tokeniser, path, exceeded, lengths, longest_target)
    targets = [target for _, target in kept]
    report = LoadReport(
        tokeniser.key,
        path,
        kept=len(kept),
        dropped=dropped,
        truncated=0 if how == "drop" else exceeding,
        longest_tokens=max(lengths),
        limits=exceeded,
        notes=format_notes(noted, ignored),
        of_files=tuple(of_files),
    )
    kept_prompts = prompt_set([prompt for prompt, _ in kept])
    return SupervisedSet(kept_prompts, np.concatenate(targets), offsets_of(list(map(len, targets)))), report


def _nothing_kept(
    tokeniser: BlockTokeniser, path: str, exceeded: str, lengths: Sequence[int], longest_target: int
) -> DataError:
    key = tokeniser.key
    if not lengths:
        return DataError(f"{key}: {path} has no rows; set {key} to a file with prompts")
    if HINT_LIMIT in exceeded:
        return DataError(f"{key}: all {len(lengths)} rows of {path} are too long ({exceeded}); raise the limits")
    if tokeniser.with_targets:
        return DataError(
            f"{key}: all {len(lengths)} rows of {path} are too long ({exceeded}; the longest prompt has {max(lengths)}"
            f" tokens, the longest target {longest_target}); raise the limits"
        )
    return DataError(
        f"{key}: all {len(lengths)} prompts of {path} are {exceeded} ({min(lengths)} to {max(lengths)} tokens); raise "
        "rollout.max_prompt_tokens"
    )


def _truncated(prompt: Prompt, limit: int, how: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Truncate a prompt to `limit` tokens on the side `how`; its text becomes the text of the remaining tokens."""
    if how == "drop" or len(prompt.token_ids) <= limit:
        return prompt
    ids = prompt.token_ids[-limit:] if how == "truncate_left" else prompt.token_ids[:limit]
    return replace(prompt, token_ids=ids, text=str(tokenizer.decode(ids.tolist())))
