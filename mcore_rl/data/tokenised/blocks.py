"""Rows of files as tokens, a block at a time, in the order of the files whatever the number of processes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import ANSWER_COLUMNS, Columns, listing
from mcore_rl.data.files import read_rows
from mcore_rl.data.templates import PromptRenderer, encode
from mcore_rl.data.tokenised.progress import RowProgress
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_PER_BLOCK = 1024
"""A tokenizer is fast on blocks."""


@dataclass(frozen=True)
class RawBlock:
    """Consecutive rows of one file with their places; `file` is its index among the files that are read."""

    file: int
    path: Path
    rows: list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Block:
    """A block's prompts, whatever their length; `row` of each is -1 until it is part of a set. `targets`, where they
    are asked for, are the tokens of a target text and the end of sequence; `notes` those of Columns."""

    file: int
    prompts: list[Prompt]
    targets: list[np.ndarray]
    notes: Counter[str]
    ignored: list[str] = field(default_factory=list)
    """Columns that were not read."""


@dataclass(frozen=True)
class BlockTokeniser:
    """Reads columns, renders and encodes; the same in every process. `key` is the configuration key of the files.

    Raises: ConfigError for a template that the tokenizer cannot apply.
    """

    tokenizer: PreTrainedTokenizerBase
    data_config: DataConfig
    rollout_config: RolloutConfig
    key: str
    runs_tools: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    with_targets: bool = False
    _renderer: PromptRenderer = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_renderer", PromptRenderer(self.tokenizer, self.data_config, self.tools))

    @property
    def samples_train(self) -> bool:
        """Whether responses to these rows are sampled and trained on."""
        return self.key == "data.train" and not self.with_targets

    def tokenise(self, block: RawBlock) -> Block:
        """Raises: DataError naming file and row."""
        columns = Columns(
            self.data_config,
            self.key,
            block.path,
            rollout_config=self.rollout_config,
            runs_tools=self.runs_tools,
            trained=self.samples_train,
            tools=self.tools,
        )
        rows = [columns.read(place, row) for place, row in block.rows]
        rows = [replace(row, messages=self._renderer.canonical(row.messages, row.where)) for row in rows]
        texts = list(self._renderer.render_all([(row.messages, row.where, row.tools) for row in rows]))
        ids = encode(self.tokenizer, texts, self._renderer.leading_ids)
        prompts = [
            Prompt(
                row=-1,
                token_ids=token_ids,
                text=text,
                data_source=row.data_source,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
                messages=row.messages,
                sampling=row.sampling,
                max_turns=row.max_turns,
                tools=row.tools,
            )
            for row, text, token_ids in zip(rows, texts, ids, strict=True)
        ]
        targets = self._targets(block.rows) if self.with_targets else []
        notes, ignored = columns.take_notes() + self._renderer.take_notes(), columns.take_ignored()
        return Block(block.file, prompts, targets, notes, [name for name in ignored if name != self._target_column])

    @property
    def _target_column(self) -> str | None:
        return (self.data_config.answer_key or ANSWER_COLUMNS[0]) if self.with_targets else None

    def _targets(self, rows: list[tuple[str, dict[str, Any]]]) -> list[np.ndarray]:
        texts, column = [], str(self._target_column)
        for place, row in rows:
            text = row.get(column)
            if not isinstance(text, str) or not text:
                raise DataError(
                    f"{self.key}: {place} has no target text in column {column!r} (its columns are "
                    f"{listing(row, column)}); set data.answer_key to the column of target texts"
                )
            texts.append(text)
        eos = np.array([self.tokenizer.eos_token_id], np.int32)
        return [np.concatenate([ids, eos]) for ids in encode(self.tokenizer, texts)]


def tokenised_blocks(files: Sequence[Path], tokeniser: BlockTokeniser) -> Iterator[Block]:
    """All rows of the files, in their order, by data.workers processes. A file that takes long shows how far it is.

    Raises: DataError for the first row, in this order, that is malformed; WorkerDiedError.
    """
    raw = _raw_blocks(files, tokeniser.key)
    first = list(islice(raw, 2))
    raw = itertools.chain(first, raw)
    if tokeniser.data_config.workers > 1 and len(first) > 1:  # one block would wait for a process to start
        from mcore_rl.data.tokenised.processes import tokenise_in_processes

        blocks = tokenise_in_processes(raw, tokeniser)
    else:
        blocks = map(tokeniser.tokenise, raw)
    with RowProgress(tokeniser.key, files) as progress:
        for block in blocks:
            progress.advance(len(block.prompts), block.file)
            yield block


def _raw_blocks(files: Sequence[Path], key: str) -> Iterator[RawBlock]:
    for index, path in enumerate(files):
        rows = read_rows(path, key)
        while block := list(islice(rows, _ROWS_PER_BLOCK)):
            yield RawBlock(index, path, block)
