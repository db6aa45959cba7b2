"""Encoding of responses after their prompts: texts, or messages rendered by the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mcore_rl.config.schema import DataConfig
from mcore_rl.data.chat.limits import TemplateLimitError, render_all
from mcore_rl.data.chat.messages import text_of
from mcore_rl.data.supervised.targets import Target
from mcore_rl.data.supervised.turns import Piece, TurnFinder, Turns
from mcore_rl.data.templates import PromptRenderer, encode
from mcore_rl.errors import DataError
from mcore_rl.types import Prompt
from mcore_rl.types.chat import ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Response = str | list[ChatMessage]
SKIPPED_NOTE = (
    "have turns that the chat template shows differently once later messages follow; these turns are not trained"
)


class TextRow(NamedTuple):
    """The prompt of a row and its responses, before they are encoded. margin: see Texts."""

    prompt: Prompt
    responses: tuple[Response, ...]
    margin: float = 0.0


class Answered(NamedTuple):
    """A response to encode, with its prompt; where: start of error messages."""

    prompt: Prompt
    response: Response
    where: str


@dataclass(frozen=True)
class ResponseEncoder:
    """Encoder of responses.

    A response that is a text follows the rendered prompt and ends with the tokenizer's end-of-sequence token. A
    response of messages is rendered by the chat template together with its prompt. The turns of the assistant are
    trained, each with its stop token, unless the message has `train: false` or `weight: 0`; other messages are not.

    stop_ids: tokens that end a response.

    Raises: ConfigError for a template that the tokenizer cannot apply.
    """

    tokenizer: PreTrainedTokenizerBase
    data_config: DataConfig
    stop_ids: tuple[int, ...]
    renderer: PromptRenderer = field(init=False)
    _finder: TurnFinder | None = field(init=False)

    def __post_init__(self) -> None:
        renderer = PromptRenderer(self.tokenizer, self.data_config)
        stops = tuple(str(self.tokenizer.convert_ids_to_tokens(stop)) for stop in self.stop_ids)
        finder = None if renderer.style is None else TurnFinder(renderer.style, stops)
        # The dataclass is frozen, and both are part of what the tokenising processes receive.
        object.__setattr__(self, "renderer", renderer)
        object.__setattr__(self, "_finder", finder)

    def prompts(self, prompts: Sequence[Prompt], places: Sequence[str]) -> list[Prompt]:
        """Render and encode prompts."""
        messages = [self.renderer.canonical(each.messages, at) for each, at in zip(prompts, places, strict=True)]
        shown = [(each, at, prompt.tools) for each, at, prompt in zip(messages, places, prompts, strict=True)]
        texts = list(self.renderer.render_all(shown))
        ids = encode(self.tokenizer, texts, self.renderer.leading_ids)
        columns = zip(prompts, messages, texts, ids, strict=True)
        return [_rendered(prompt, each, text, token_ids) for prompt, each, text, token_ids in columns]

    def responses(self, answered: Sequence[Answered]) -> tuple[list[Target], int]:
        """Encode responses to rendered prompts. Also returns the number of rows with skipped turns (see Turns).

        Rows with reasoning that the chat template drops after the prompt are noted by the renderer.

        Raises: DataError.
        """
        jobs = [partial(self._turns, each) for each in answered]
        # In a child process only if there is a template to render: forking costs more than joining texts.
        renders = self._finder is not None and not all(isinstance(each.response, str) for each in answered)
        try:
            found = list(render_all(jobs)) if renders else [job() for job in jobs]
        except TemplateLimitError as error:
            raise DataError(f"{answered[error.job].where}: the tokenizer's chat template {error}") from None
        # A pair has two responses, and counts once.
        placed = [(each.where, turns) for each, turns in zip(answered, found, strict=True)]
        self.renderer.note_lost_reasoning(len({where for where, turns in placed if turns.forgets}))
        skipped = len({where for where, turns in placed if turns.skipped})
        return self._targets([turns.pieces for turns in found]), skipped

    def _turns(self, answered: Answered) -> Turns:
        """Return the text after the prompt as pieces."""
        prompt, response, where = answered
        if isinstance(response, str):
            return _text(response)
        if self._finder is None:
            if len(response) > 1 or response[0].get("tool_calls"):
                raise DataError(
                    f"{where} has several messages or tool calls, which need a chat template; set data.template=chat, "
                    "or remove the row"
                )
            return _text(text_of(response[0]))
        first = len(prompt.messages)
        whole = self.renderer.canonical([*prompt.messages, *response], where)
        turns = [n for n in range(first, len(whole)) if is_trained(whole[n], f"{where}: message {n + 1}")]
        if not turns:
            raise DataError(f"{where} has no turn of the assistant that is trained; remove the row")
        forgets = self.renderer.check_conversation(whole, prompt, where)
        found = self._finder.find(whole, turns, where, prompt.tools)
        if found.pieces[0].text != prompt.text:
            raise DataError(
                f"{where}: the tokenizer's chat template shows the prompt differently when a response follows; remove "
                "the row, or write prompt and response as texts"
            )
        return Turns(found.pieces[1:], found.skipped, forgets)

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


def is_trained(message: ChatMessage, where: str) -> bool:
    """Return whether a message is a turn of the assistant that is trained.

    Raises: DataError for a `weight` other than 0 and 1, or a `train` that is not a boolean.
    """
    if message["role"] != "assistant":
        return False
    weight, train = message.get("weight", 1), message.get("train", True)
    if weight not in (0, 1) or not isinstance(train, bool):
        raise DataError(
            f"{where} has weight={weight} and train={train}; a turn is trained (weight 1, train true) or not (weight 0 "
            "or train false)"
        )
    return bool(weight) and train


def _text(text: str) -> Turns:
    return Turns((Piece(text, trained=True), Piece("", trained=True)))


def _rendered(prompt: Prompt, messages: list[ChatMessage], text: str, token_ids: np.ndarray) -> Prompt:
    return replace(prompt, messages=messages, text=text, token_ids=token_ids)
