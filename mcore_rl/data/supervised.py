"""Prompts with target texts, in the buffers that rollouts use, so that supervised training uses the same actor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import format_notes
from mcore_rl.data.prompts import (
    LoadReport,
    PromptSet,
    prompt_set,
    prompts_from_entry,
    report_from_entry,
    to_cache_entry,
    with_notes,
)
from mcore_rl.data.sources.paths import Names, find_files, format_files
from mcore_rl.data.tokenised.blocks import BlockTokeniser
from mcore_rl.data.tokenised.cache import open_cache
from mcore_rl.data.tokenised.reader import tokenised_blocks
from mcore_rl.data.trajectories import offsets_of
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.types import Prompt, RolloutScalars, TrajectoryBuffers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TARGETS = "targets"
"""Name of the targets' token ids in the cache."""


@dataclass(frozen=True)
class SupervisedSet:
    """Tokenised prompts with their targets; a target ends with the end-of-sequence token.

    Shapes: target_tokens int32 [sum T]; target_offsets int64 [N + 1].
    """

    prompts: PromptSet
    target_tokens: np.ndarray
    target_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)


def load_supervised(
    names: Names,
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig,
    rollout_config: RolloutConfig,
    key: str = "data.train",
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
    files = find_files(names, key)
    tokeniser = BlockTokeniser(tokenizer, data_config, rollout_config, key, with_targets=True)
    cache = open_cache(files, tokeniser)
    if cache is not None and (entry := cache.load()) is not None:
        return SupervisedSet(prompts_from_entry(entry), *entry.ragged[TARGETS]), report_from_entry(
            entry, key, files, cache.notes
        )
    supervised, report = _read_supervised(files, tokeniser)
    if cache is not None:
        entry = to_cache_entry(supervised.prompts, report)
        targets = {TARGETS: (supervised.target_tokens, supervised.target_offsets)}
        cache.save(replace(entry, ragged={**entry.ragged, **targets}))
    return supervised, with_notes(report, files, [] if cache is None else cache.notes)


def supervised_chunk(
    data: SupervisedSet, rows: np.ndarray, *, first_group: int = 0
) -> tuple[TrajectoryBuffers, RolloutScalars]:
    """Convert rows to one chunk of trajectories, with one group per row. Only targets are trained.

    Log-probabilities of a sampling policy do not exist and are 0, as are versions, rewards and accuracies.

    Shapes: rows integer [B]; group ids are [first_group, first_group + B).
    """
    prompts = [data.prompts.tokens[a:b] for a, b in _bounds(data.prompts.offsets, rows)]
    targets = [data.target_tokens[a:b] for a, b in _bounds(data.target_offsets, rows)]
    prompt_tokens = np.array([len(prompt) for prompt in prompts], np.int32)
    target_tokens = np.array([len(target) for target in targets], np.int32)
    pieces = [piece for pair in zip(prompts, targets, strict=True) for piece in pair]
    num_trained = int(target_tokens.sum())
    buffers = TrajectoryBuffers(
        tokens=np.concatenate([*pieces, np.empty(0, np.int32)]),
        token_offsets=offsets_of(prompt_tokens + target_tokens),
        prompt_tokens=prompt_tokens,
        response_offsets=offsets_of(target_tokens),
        logp_rollout=np.zeros(num_trained, np.float32),
        versions=np.zeros(num_trained, np.int32),
        trained=np.ones(num_trained, np.uint8),
    )
    zeros = np.zeros(len(rows), np.float32)
    scalars = RolloutScalars(
        group_ids=np.arange(first_group, first_group + len(rows), dtype=np.int64),
        prompt_rows=np.asarray(rows, np.int64),
        total_tokens=prompt_tokens + target_tokens,
        response_tokens=target_tokens,
        trained_tokens=target_tokens,
        rewards=zeros,
        accuracies=zeros,
        clipped=np.zeros(len(rows), np.uint8),
        versions=np.zeros((len(rows), 2), np.int32),
    )
    return buffers, scalars


def _read_supervised(files: Sequence[Path], tokeniser: BlockTokeniser) -> tuple[SupervisedSet, LoadReport]:
    rollout_config, key = tokeniser.rollout_config, tokeniser.key
    kept: list[tuple[Prompt, np.ndarray]] = []
    longest_prompt = longest_target = long_prompts = long_targets = 0
    noted: Counter[str] = Counter()
    ignored: dict[str, None] = {}
    of_files = [0] * len(files)
    for block in tokenised_blocks(files, tokeniser):
        noted += block.notes
        ignored |= dict.fromkeys(block.ignored)
        for prompt, target in zip(block.prompts, block.targets, strict=True):
            longest_prompt = max(longest_prompt, len(prompt.token_ids))
            longest_target = max(longest_target, len(target))
            if len(prompt.token_ids) > rollout_config.max_prompt_tokens:
                long_prompts += 1
            elif len(target) > rollout_config.max_response_tokens:
                long_targets += 1
            else:
                kept.append((prompt, target))
                of_files[block.file] += 1
    dropped = long_prompts + long_targets
    limits = (
        f"{long_prompts} prompts longer than rollout.max_prompt_tokens={rollout_config.max_prompt_tokens},"
        f" {long_targets} targets longer than rollout.max_response_tokens={rollout_config.max_response_tokens}"
    )
    if not kept:
        raise DataError(_nothing_left(format_files(files), key, dropped, limits, longest_prompt, longest_target))
    targets = [target for _, target in kept]
    supervised = SupervisedSet(
        prompts=prompt_set([prompt for prompt, _ in kept]),
        target_tokens=np.concatenate(targets),
        target_offsets=offsets_of([len(target) for target in targets]),
    )
    report = LoadReport(
        key,
        format_files(files),
        len(kept),
        dropped,
        longest_prompt,
        limits,
        notes=format_notes(noted, ignored),
        of_files=tuple(of_files),
    )
    return supervised, report


def _bounds(offsets: np.ndarray, rows: np.ndarray) -> list[tuple[int, int]]:
    rows = np.asarray(rows, np.int64)
    return list(zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True))


def _nothing_left(path: str, key: str, dropped: int, limits: str, longest_prompt: int, longest_target: int) -> str:
    if not dropped:
        return f"{key}: {path} has no rows; set {key} to a file with prompts"
    return (
        f"{key}: all {dropped} rows of {path} are too long ({limits}; the longest prompt has {longest_prompt} tokens,"
        f" the longest target {longest_target}); raise the limits"
    )
