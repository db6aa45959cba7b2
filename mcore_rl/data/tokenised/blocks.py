"""Blocks of rows and their conversion to tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import ANSWER_COLUMNS, Columns, listing
from mcore_rl.data.files import Row
from mcore_rl.data.templates import PromptRenderer, encode
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt
from mcore_rl.types.chat import ToolSchema
from mcore_rl.vision.placeholders import expanded
from mcore_rl.vision.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RawBlock:
    """Consecutive rows of one file with their places, such as "a.jsonl, line 12".

    file: index among the files that are read.
    """

    file: int
    path: Path
    rows: list[tuple[str, Row]]


@dataclass(frozen=True)
class Block:
    """A tokenised block, before rows are dropped for their length.

    prompts: their `row` is -1 until they are part of a set.
    targets: tokens of the target texts with the end of sequence; empty unless requested.
    notes: counted remarks about rows (Columns.notes).
    ignored: columns that were not read.
    """

    file: int
    prompts: list[Prompt]
    targets: list[np.ndarray]
    notes: Counter[str]
    ignored: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BlockTokeniser:
    """Reads the columns of rows, renders the prompts and encodes them.

    key: configuration key of the files.
    images: image processor of a model that reads images.

    Raises: ConfigError for a template that the tokenizer cannot apply.
    """

    tokenizer: PreTrainedTokenizerBase
    data_config: DataConfig
    rollout_config: RolloutConfig
    key: str
    runs_tools: bool = False
    tools: tuple[ToolSchema, ...] = ()
    with_targets: bool = False
    images: ImageProcessor | None = None
    _renderer: PromptRenderer = field(init=False)

    def __post_init__(self) -> None:
        # The dataclass is frozen, and the renderer is part of what the tokenising processes receive.
        object.__setattr__(self, "_renderer", PromptRenderer(self.tokenizer, self.data_config, self.tools))
        if self.images is not None:
            self._renderer.check_image(self.images.text)

    @property
    def samples_train(self) -> bool:
        """True if the run samples responses to these rows and trains on them."""
        return self.key == "data.train" and not self.with_targets

    @property
    def reads_hints(self) -> bool:
        """True if a teacher scores responses to these rows after other prompts."""
        return self.samples_train and self.data_config.hint_key is not None

    def tokenise(self, block: RawBlock) -> Block:
        """Tokenise a block.

        Raises: DataError naming file and row.
        """
        columns = Columns(
            self.data_config,
            self.rollout_config,
            self.key,
            block.path,
            runs_tools=self.runs_tools,
            trained=self.samples_train,
            tools=self.tools,
            image_text=None if self.images is None else self.images.text,
        )
        rows = [(f"{self.key}: {place}", columns.read(place, row)) for place, row in block.rows]
        messages = [self._renderer.canonical(row.messages, where) for where, row in rows]
        shown = [(each, where, row.tools) for each, (where, row) in zip(messages, rows, strict=True)]
        texts = list(self._renderer.render_all(shown))
        ids = encode(self.tokenizer, texts, self._renderer.leading_ids)
        if self.images is not None:
            ids = [self._with_images(each, row, where) for each, (where, row) in zip(ids, rows, strict=True)]
        prompts = [
            replace(row, messages=row_messages, text=text, token_ids=token_ids)
            for (_, row), row_messages, text, token_ids in zip(rows, messages, texts, ids, strict=True)
        ]
        if self.reads_hints:
            hints = self._hints(block, columns, [row for _, row in rows])
            prompts = [replace(prompt, hint_ids=hint) for prompt, hint in zip(prompts, hints, strict=True)]
        targets = self._targets(block.rows) if self.with_targets else []
        # Columns does not read the target column and would report it as ignored.
        ignored = [name for name in columns.ignored if name != self._target_column]
        return Block(block.file, prompts, targets, columns.notes + self._renderer.take_notes(), ignored)

    def _hints(self, block: RawBlock, columns: Columns, rows: list[Prompt]) -> list[np.ndarray]:
        """Tokenise the prompts with hints; empty for rows without a hint. Shapes: int32 [H] each."""
        found = [
            (columns.hinted(place, raw, row), f"{self.key}: {place}: prompt with the hint", row.tools)
            for (place, raw), row in zip(block.rows, rows, strict=True)
        ]
        shown = [(self._renderer.canonical(given, where), where, tools) for given, where, tools in found if given]
        texts = list(self._renderer.render_all(shown)) if shown else []
        ids = iter(encode(self.tokenizer, texts, self._renderer.leading_ids))
        return [next(ids) if given else np.empty(0, np.int32) for given, _, _ in found]

    def _with_images(self, token_ids: np.ndarray, row: Prompt, where: str) -> np.ndarray:
        """Repeat the placeholders of images. Shapes: int32 [tokens of the text] -> int32 [P]."""
        assert self.images is not None
        if row.images and self.data_config.long_prompts != "drop":
            raise DataError(
                f"{where} has images, which data.long_prompts={self.data_config.long_prompts} could cut; set it to drop"
            )
        counts = [
            self.images.num_features(source, f"{where}: image {number}")
            for number, source in enumerate(row.images, start=1)
        ]
        return expanded(token_ids, self.images.image_token, counts, where)

    @property
    def _target_column(self) -> str | None:
        return (self.data_config.answer_key or ANSWER_COLUMNS[0]) if self.with_targets else None

    def _targets(self, rows: list[tuple[str, Row]]) -> list[np.ndarray]:
        texts, column = [], str(self._target_column)
        for place, row in rows:
            text = row.get(column)
            if not isinstance(text, str) or not text:
                raise DataError(
                    f"{self.key}: {place} has no target text in column {column!r} (its columns are "
                    f"{listing(row, column)}); set data.answer_key to the column of target texts"
                )
            texts.append(text)
        # Without leading_ids: a target continues its prompt.
        eos = np.array([self.tokenizer.eos_token_id], np.int32)
        return [np.concatenate([ids, eos]) for ids in encode(self.tokenizer, texts)]
