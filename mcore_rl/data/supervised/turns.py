"""Trained spans of a rendered conversation: the text that the model would have sampled in each of its turns.

A turn begins after the text that opens it for generation and ends with its first stop token, before the next message:

    <user>?<end>\\n<assistant>Yes.<end>\\n<user>how so?<end>\\n<assistant>Because.<end>\\n
                             ^^^^^^^^^                                   ^^^^^^^^^^^^^
Each piece of text is tokenised by itself: at inference, the text that opens a turn is tokenised before the turn exists.

In some templates the token that begins the next message is the stop token. The last turn of a conversation then gets
the token that a further message would begin with: a user's, or a tool's after calls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mcore_rl.data.chat.messages import text_of
from mcore_rl.data.chat.style import ChatStyle
from mcore_rl.errors import DataError
from mcore_rl.types.chat import ChatMessage, ToolSchema

_MARK = "mark00000z"


@dataclass(frozen=True)
class Piece:
    """Part of the text of a conversation. `trained`: it is a turn of the model that is trained, with its stop token."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Turns:
    """Text of a conversation as pieces; the first one opens the first trained turn. `skipped`: number of turns that are
    not trained, because the template changes the text before them once later messages follow. `forgets`: the text lacks
    reasoning that the prompt alone shows, or that follows the prompt."""

    pieces: tuple[Piece, ...]
    skipped: int = 0
    forgets: bool = False


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
            turn = _Turn(style, messages, index, text, len(opening), f"{where}: message {index + 1}")
            end, added = self._end(turn)
            trained_text = text[len(opening) : end] + added
            pieces += [Piece(text[place : len(opening)], trained=False), Piece(trained_text, trained=True)]
            place = end
        return Turns(tuple(pieces), skipped)

    def _end(self, turn: _Turn) -> tuple[int, str]:
        """Return the end of the turn in the text with its stop token, and the text to add if nothing follows it."""
        content = text_of(turn.message) + str(turn.message.get("reasoning_content", ""))
        if (inside := next((stop for stop in self.stops if stop in content), None)) is not None:
            raise DataError(f"{turn.where} contains {inside}, which ends a turn; remove the row")
        if (end := self._first(turn.text, turn.start, turn.limit())) is not None:
            return end, ""
        after = turn.begun_next() if turn.is_last else ""
        if stop := next((stop for stop in self.stops if after.lstrip().startswith(stop)), None):
            return len(turn.text), after[: after.index(stop)] + stop
        stops = ", ".join(self.stops)
        if not turn.is_last and self._first(turn.text, turn.start, len(turn.text)) is not None:
            raise DataError(
                f"{turn.where}: the tokenizer's chat template does not end this turn: none of {stops}, the tokens that "
                'end a response, is before the next message; set "train": false in the message, or use a tokenizer '
                "whose template ends every turn"
            )
        raise DataError(
            f"{turn.where}: the tokenizer's chat template ends the model's turn with none of {stops}, "
            "the tokens that end a response; set eos_token in tokenizer_config.json, or data.template=plain"
        )

    def _first(self, text: str, start: int, limit: int) -> int | None:
        """Return the end of the first stop token in text[start:limit]."""
        found = [place + len(stop) for stop in self.stops if (place := text.find(stop, start, limit)) >= 0]
        return min(found, default=None)


@dataclass(frozen=True)
class _Turn:
    """Message `index` of a conversation, whose turn begins at text[start]. where: start of error messages."""

    style: ChatStyle
    messages: Sequence[ChatMessage]
    index: int
    text: str
    start: int
    where: str

    @property
    def message(self) -> ChatMessage:
        return self.messages[self.index]

    @property
    def is_last(self) -> bool:
        return self.index == len(self.messages) - 1

    def limit(self) -> int:
        """Return the place in the text where the content of the next message begins, or the end of the text.

        A mark in the later contents shows the place. It is in the middle of each, because templates look at both ends
        of a content, for example for the tags of tool results.
        """
        if self.is_last:
            return len(self.text)
        later: list[ChatMessage] = [_marked(message) for message in self.messages[self.index + 1 :]]
        marked = self.style.render([*self.messages[: self.index + 1], *later], self.where, opens_turn=False)
        pairs = enumerate(zip(self.text[self.start :], marked[self.start :], strict=False), start=self.start)
        limit = next((place for place, (one, other) in pairs if one != other), len(self.text))
        # The first half of the next content is before the mark.
        half = text_of(later[0]).partition(_MARK)[0].strip()
        shown = self.text[self.start : limit].rstrip()
        return self.start + len(shown) - len(half) if half and shown.endswith(half) else limit

    def begun_next(self) -> str:
        """Return the text between this last turn and the content of a further message; "" if it cannot be found."""
        answers: list[ChatMessage] = [
            {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": _MARK}
            for call in self.message.get("tool_calls", ())
        ]
        following: list[ChatMessage] = answers or [{"role": "user", "content": _MARK}]
        try:
            longer = self.style.render([*self.messages, *following], self.where, opens_turn=False)
        except DataError:
            return ""
        before = longer.partition(_MARK)[0]
        if before.startswith(self.text):
            return before[len(self.text) :]
        # Templates may drop the reasoning of the turn once a user message follows.
        content = text_of(self.message).rpartition("</think>")[2].strip()
        return before.rpartition(content)[2] if content and not answers else ""


def _marked(message: ChatMessage) -> ChatMessage:
    content = text_of(message)
    middle = len(content) // 2
    return {**message, "content": content[:middle] + _MARK + content[middle:]}
