"""Tokenisation of blocks of pairs, and of conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.columns import Columns, Row
from mcore_rl.data.supervised.conversations import CONVERSATION_COLUMNS, read_conversation
from mcore_rl.data.supervised.encoder import SKIPPED_NOTE, Answered, ResponseEncoder, TextRow
from mcore_rl.data.supervised.pairs import MARGIN_COLUMN, RESPONSE_COLUMNS, read_pair, read_scored_pair
from mcore_rl.data.supervised.targets import Target, Texts
from mcore_rl.data.tokenised.blocks import Block, RawBlock

Read = Callable[[Columns, str, Row, bool], TextRow]
"""Function (columns, place, row, struct_nulls) that extracts the prompt of a row and its responses."""


@dataclass(frozen=True)
class TargetBlock(Block):
    """A tokenised block of rows with one or more responses each; `targets` of the base class stays empty."""

    texts: list[Texts] = field(default_factory=list)


@dataclass(frozen=True)
class Format:
    """Format of rows. columns: columns that the prompt's reader does not know. needs_sum: the limit applies to prompt
    and response together."""

    read: Read
    columns: tuple[str, ...]
    kind: str
    needs_sum: bool


PAIRS = Format(read_pair, RESPONSE_COLUMNS, "pairs", needs_sum=False)
SCORED_PAIRS = Format(read_scored_pair, (*RESPONSE_COLUMNS, MARGIN_COLUMN), "pairs", needs_sum=False)
CONVERSATIONS = Format(read_conversation, CONVERSATION_COLUMNS, "conversations", needs_sum=True)


@dataclass(frozen=True)
class TargetTokeniser:
    """Reads the columns of rows, renders prompts and responses, and encodes them."""

    encoder: ResponseEncoder
    format: Format
    rollout_config: RolloutConfig
    key: str

    @property
    def data_config(self) -> DataConfig:
        return self.encoder.data_config

    def tokenise(self, block: RawBlock) -> TargetBlock:
        """Tokenise a block.

        Raises: DataError naming file and row.
        """
        columns = Columns(self.data_config, self.rollout_config, self.key, block.path, graded=False)
        struct_nulls = block.path.suffix not in (".jsonl", ".csv")
        rows = [self.format.read(columns, place, row, struct_nulls) for place, row in block.rows]
        places = [f"{self.key}: {place}" for place, _ in block.rows]
        prompts = self.encoder.prompts([row.prompt for row in rows], places)
        answered = [
            Answered(prompt, response, place)
            for prompt, row, place in zip(prompts, rows, places, strict=True)
            for response in row.responses
        ]
        targets, skipped = self.encoder.responses(answered)
        ignored = [name for name in columns.ignored if name not in self.format.columns]
        notes = columns.notes + self.encoder.renderer.take_notes() + Counter({SKIPPED_NOTE: skipped})
        return TargetBlock(block.file, prompts, [], notes, ignored, _texts(targets, rows))


def _texts(targets: Sequence[Target], rows: Sequence[TextRow]) -> list[Texts]:
    rest = iter(targets)
    return [Texts(tuple(next(rest) for _ in row.responses), row.margin) for row in rows]
