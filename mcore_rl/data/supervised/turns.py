"""Trained spans of a rendered conversation: the text that the model would have sampled in each of its turns.

A turn begins after the text that opens it for generation and ends with its first stop token:

    <user>?<end>\\n<assistant>Yes.<end>\\n<user>how so?<end>\\n<assistant>Because.<end>\\n
                             ^^^^^^^^^                                   ^^^^^^^^^^^^^
Each piece of text is tokenised by itself: at inference, the text that opens a turn is tokenised before the turn exists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mcore_rl.data.chat.messages import text_of
from mcore_rl.data.chat.style import ChatStyle
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatMessage, ToolSchema


@dataclass(frozen=True)
class Piece:
    """Part of the text of a conversation. `trained`: it is a turn of the model that is trained, with its stop token."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Turns:
    """Text of a conversation as pieces; the first one opens the first trained turn. `skipped`: number of turns that are
    not trained, because the template changes the text before them once later messages follow."""

    pieces: tuple[Piece, ...]
    skipped: int = 0


@dataclass(frozen=True)
class TurnFinder:
    """Finder of trained turns. `stops`: texts of the tokens that end a response."""

    style: ChatStyle
    stops: tuple[str, ...]

    def find(
        self,
        messages: Sequence[ChatMessage],
        trained: Collection[int],
        where: str,
        tools: Sequence[ToolSchema] | None = None,
    ) -> Turns:
        """Render canonical messages and find the turns with the indices `trained`.

        tools: tools that the template shows; None: the tools of the style. where: start of error messages.

        Raises: DataError for messages that the template rejects, and a turn that cannot be found exactly.
        """
        style = self.style if tools is None else replace(self.style, tools=tuple(tools))
        text = style.render(messages, where, opens_turn=False)
        pieces: list[Piece] = []
        place = skipped = 0
        last = max(trained)
        for index in sorted(trained):
            opening = style.render(messages[:index], where, opens_turn=True, continues=False) if index else ""
            if not opening or not text.startswith(opening) or len(opening) < place:
                if index == last:
                    raise DataError(
                        f"{where}: the tokenizer's chat template opens message {index + 1} differently for generation "
                        "than it shows it in the conversation, so the trained text would differ from sampled text; set "
                        "data.template_kwargs, for example enable_thinking=false, or remove the row"
                    )
                skipped += 1
                continue
            end = self._end(text, len(opening), messages[index], f"{where}: message {index + 1}")
            pieces += [Piece(text[place : len(opening)], trained=False), Piece(text[len(opening) : end], trained=True)]
            place = end
        return Turns(tuple(pieces), skipped)

    def _end(self, text: str, start: int, message: ChatMessage, where: str) -> int:
        """Return the end of the first stop token after `start`."""
        content = text_of(message) + str(message.get("reasoning_content", ""))
        if (inside := next((stop for stop in self.stops if stop in content), None)) is not None:
            raise DataError(f"{where} contains {inside}, which ends a turn; remove the row")
        ends = [place + len(stop) for stop in self.stops if (place := text.find(stop, start)) >= 0]
        if not ends:
            raise DataError(
                f"{where}: the tokenizer's chat template ends the model's turn with none of {', '.join(self.stops)}, "
                "the tokens that end a response; set eos_token in tokenizer_config.json, or data.template=plain"
            )
        return min(ends)
