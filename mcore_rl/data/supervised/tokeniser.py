"""Tokenisation of blocks of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.chat.limits import TemplateLimitError, render_all
from mcore_rl.data.chat.messages import text_of
from mcore_rl.data.columns import Columns
from mcore_rl.data.supervised.pairs import RESPONSE_COLUMNS, Pair, Response, read_pair
from mcore_rl.data.supervised.targets import Target
from mcore_rl.data.supervised.turns import Piece, TurnFinder
from mcore_rl.data.templates import PromptRenderer, encode
from mcore_rl.data.tokenised.blocks import Block, RawBlock
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatMessage, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PairBlock(Block):
    """A block of pairs; `targets` of the base class stays empty."""

    chosen: list[Target] = field(default_factory=list)
    rejected: list[Target] = field(default_factory=list)


@dataclass(frozen=True)
class PairTokeniser:
    """Reads the columns of pairs, renders prompts and responses, and encodes them.

    A response that is a text follows the rendered prompt and ends with the tokenizer's end-of-sequence token. A
    response of messages is rendered by the chat template together with its prompt; the turns of the assistant are
    trained, each with its stop token, and other messages are not.

    stop_ids: tokens that end a response.

    Raises: ConfigError for a template that the tokenizer cannot apply.
    """

    tokenizer: PreTrainedTokenizerBase
    data_config: DataConfig
    rollout_config: RolloutConfig
    key: str
    stop_ids: tuple[int, ...]
    _renderer: PromptRenderer = field(init=False)
    _finder: TurnFinder | None = field(init=False)

    def __post_init__(self) -> None:
        renderer = PromptRenderer(self.tokenizer, self.data_config)
        stops = tuple(str(self.tokenizer.convert_ids_to_tokens(stop)) for stop in self.stop_ids)
        finder = None if renderer.style is None else TurnFinder(renderer.style, stops)
        # The dataclass is frozen, and both are part of what the tokenising processes receive.
        object.__setattr__(self, "_renderer", renderer)
        object.__setattr__(self, "_finder", finder)

    def tokenise(self, block: RawBlock) -> PairBlock:
        """Tokenise a block.

        Raises: DataError naming file and row.
        """
        columns = Columns(self.data_config, self.rollout_config, self.key, block.path, graded=False)
        struct_nulls = block.path.suffix not in (".jsonl", ".csv")
        pairs = [read_pair(columns, place, row, struct_nulls=struct_nulls) for place, row in block.rows]
        places = [f"{self.key}: {place}" for place, _ in block.rows]
        messages = [self._renderer.canonical(p.prompt.messages, at) for p, at in zip(pairs, places, strict=True)]
        shown = [(each, at, pair.prompt.tools) for each, at, pair in zip(messages, places, pairs, strict=True)]
        texts = list(self._renderer.render_all(shown))
        ids = encode(self.tokenizer, texts, self._renderer.leading_ids)
        prompts = [
            replace(pair.prompt, messages=each, text=text, token_ids=token_ids)
            for pair, each, text, token_ids in zip(pairs, messages, texts, ids, strict=True)
        ]
        sides = list(zip(*self._responses(pairs, messages, texts, places), strict=True))
        ignored = [name for name in columns.ignored if name not in RESPONSE_COLUMNS]
        notes = columns.notes + self._renderer.take_notes()
        return PairBlock(block.file, prompts, [], notes, ignored, chosen=list(sides[0]), rejected=list(sides[1]))

    def _responses(
        self,
        pairs: Sequence[Pair],
        messages: Sequence[list[ChatMessage]],
        texts: Sequence[str],
        places: Sequence[str],
    ) -> list[tuple[Target, Target]]:
        """Return both targets of each pair."""
        jobs = [
            partial(self._pieces, response, asked, text, f"{place}: {column}", pair.prompt.tools)
            for pair, asked, text, place in zip(pairs, messages, texts, places, strict=True)
            for column, response in zip(RESPONSE_COLUMNS, pair.responses, strict=True)
        ]
        # In a child process only if there is a template to render: forking costs more than joining texts.
        renders = self._finder is not None and any(not isinstance(pair.responses[0], str) for pair in pairs)
        try:
            pieces = list(render_all(jobs)) if renders else [job() for job in jobs]
        except TemplateLimitError as error:
            raise DataError(f"{places[error.job // 2]}: the tokenizer's chat template {error}") from None
        targets = self._targets(pieces)
        return list(zip(targets[::2], targets[1::2], strict=True))

    def _pieces(
        self,
        response: Response,
        asked: Sequence[ChatMessage],
        prompt: str,
        where: str,
        tools: Sequence[ToolSchema] | None,
    ) -> list[Piece]:
        """Return the text after the prompt as pieces."""
        if isinstance(response, str):
            return [Piece(response, trained=True), Piece("", trained=True)]
        if self._finder is None:
            if len(response) > 1 or response[0].get("tool_calls"):
                raise DataError(
                    f"{where} has several messages or tool calls, which need a chat template; set data.template=chat, "
                    "or remove the row"
                )
            return [Piece(text_of(response[0]), trained=True), Piece("", trained=True)]
        whole = self._renderer.canonical([*asked, *response], where)
        turns = [n for n in range(len(asked), len(whole)) if whole[n]["role"] == "assistant"]
        found = self._finder.find(whole, turns, where, tools)
        if found.pieces[0].text != prompt:
            raise DataError(
                f"{where}: the tokenizer's chat template shows the prompt differently when a response follows; remove "
                "the row, or write prompt and response as texts"
            )
        return list(found.pieces[1:])

    def _targets(self, responses: Sequence[Sequence[Piece]]) -> list[Target]:
        """Encode the pieces of responses; an empty piece is the end of the sequence."""
        eos = np.array([self.tokenizer.eos_token_id], np.int32)
        # Each piece by itself; none of them begins a sequence, so there are no leading tokens.
        encoded = iter(encode(self.tokenizer, [piece.text for pieces in responses for piece in pieces if piece.text]))
        targets = []
        for pieces in responses:
            ids = [next(encoded) if piece.text else eos for piece in pieces]
            trained = [np.full(len(each), piece.trained, np.uint8) for each, piece in zip(ids, pieces, strict=True)]
            targets.append(Target(np.concatenate(ids), np.concatenate(trained)))
        return targets
