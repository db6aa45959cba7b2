"""Texts of replies while they are sampled, in the engine's process.

Only text that later tokens cannot change is sent: it has no part of a character, of a stop string, of a call or of a
tag. The complete reply has the rest. Reading the text does not affect the sampled tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mcore_rl.data.tokenizer import PLAIN, byte_token_ids, changes_spaces
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.gateway.formats.texts import FormatReader
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta, TextReceiver, TokenLogp, joined
from mcore_rl.rollout.gateway.settled_text import SettledText, StopGate
from mcore_rl.rollout.reported_requests import Report
from mcore_rl.rollout.tools.parsers import text_reader
from mcore_rl.rollout.tools.turn_reader import Kind, Part
from mcore_rl.types import Delta, GenerationRequest


class Reader(Protocol):
    """Splits the text of a choice into parts."""

    def add(self, text: str) -> list[Part]: ...


class _Content:
    """Reader of a text without reasoning and calls."""

    def add(self, text: str) -> list[Part]:
        return [("content", text)] if text else []


@dataclass
class ChoiceStream:
    """Text of one choice.

    gate: for requests with stop strings. piece_of: text of a token; None unless log-probabilities are requested.
    stop_ids: tokens that have no text at the end of a choice.
    """

    number: int
    text: SettledText
    reader: Reader
    gate: StopGate | None
    piece_of: Callable[[int], str] | None
    stop_ids: Collection[int] = ()
    _ids: list[int] = field(default_factory=list)
    """All tokens."""
    _new: list[tuple[int, float]] = field(default_factory=list)
    """Tokens since the last call of `take`, with their log-probabilities."""
    _num_read: int = 0
    """Number of tokens that were read."""
    _num_shown: int = 0
    """Number of tokens that were read when the last delta was returned. The text of later ones is held."""
    _is_held: bool = False
    """True if all further text is left to the complete reply."""
    _pending: list[TokenLogp] = field(default_factory=list)
    """Tokens whose text was not returned yet, if log-probabilities are requested."""
    _returned: int = 0
    """Number of tokens that belong to returned deltas."""
    _length: int = 0
    """Number of characters of the returned deltas."""

    def add(self, position: int, delta: Delta) -> bool:
        """Add tokens that follow the first `position` ones. Tokens that are known were sampled again.

        Returns False if tokens whose text was returned differ now. If others differ, the reader may hold their text,
        so nothing more is returned.
        """
        assert position <= len(self._ids), "tokens before these ones were not reported"
        known = self._ids[position : position + len(delta.token_ids)]
        equal = next((place for place, token in enumerate(known) if delta.token_ids[place] != token), None)
        if equal is not None:
            self._is_held = True
            del self._ids[position + equal :]
        new = list(zip(delta.token_ids, delta.logp, strict=True))[len(self._ids) - position :]
        self._ids += [token for token, _ in new]
        if self._is_held:
            self._new = []
        else:
            self._new += new
        return equal is None or position + equal >= self._num_shown

    def take(self) -> list[TextDelta]:
        """Return the text that is certain since the last call."""
        count = len(self._new)
        if count and self._new[-1][0] in self.stop_ids:
            count -= 1
        new, self._new = self._new[:count], self._new[count:]
        if self.piece_of is None:
            return self._read([token for token, _ in new])
        deltas = list[TextDelta]()
        for token, logp in new:  # one by one, so that each delta has its tokens
            self._pending.append((self.piece_of(token), logp))
            deltas += self._read([token])
        return deltas

    def _read(self, tokens: Sequence[int]) -> list[TextDelta]:
        self._num_read += len(tokens)
        passed = tokens if self.gate is None else self.gate.add(tokens)
        deltas = [self._delta(kind, text) for kind, text in self.reader.add(self.text.add(passed))]
        if deltas:
            self._num_shown = self._num_read
        return deltas

    def _delta(self, kind: Kind, text: str) -> TextDelta:
        tokens = self._pending
        delta = TextDelta(self.number, kind, self._length, text, self._returned, tokens)
        self._length += len(text)
        self._returned, self._pending = self._returned + len(tokens), []
        return delta


class ReplyStream:
    """Text of the choices of one request, which `receiver` receives.

    start_of: ReplyStart for the first choice's request.
    """

    def __init__(self, receiver: TextReceiver, start_of: Callable[[GenerationRequest], ReplyStart]) -> None:
        self._receiver, self._start_of = receiver, start_of
        self._start: ReplyStart | None = None
        self._choices: list[ChoiceStream] = []
        self._is_scheduled = self._is_closed = False

    def begin_choice(self, stream: ChoiceStream | None, request: GenerationRequest) -> Report | None:
        """Begin a choice; the first one begins first. `stream`: None if its text is not certain before its end."""
        if self._start is None:
            self._start = self._start_of(request)
        if stream is None:
            return None
        self._choices.append(stream)

        def report(position: int, delta: Delta) -> None:
            if not stream.add(position, delta):
                self._diverge()
            elif not self._is_scheduled:
                # The tokens of several steps arrive together and are decoded at once.
                self._is_scheduled = True
                asyncio.get_running_loop().call_soon(self._send)

        return report

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True

    def _diverge(self) -> None:
        """End the texts: the reply will be another one."""
        assert self._start is not None
        if not self._is_closed:
            self._receiver(self._start, None)
        self.close()

    def _send(self) -> None:
        self._is_scheduled = False
        assert self._start is not None
        deltas = [] if self._is_closed else [delta for stream in self._choices for delta in joined(stream.take())]
        if deltas:
            self._receiver(self._start, deltas)


def choice_stream(
    context: EpisodeContext, request: GenerationRequest, before: str | None, *, number: int, has_logps: bool
) -> ChoiceStream | None:
    """Return the stream of a choice.

    before: text before the turn, in which the reasoning may begin (Session.text_before); None: a text without a chat
    template, which has no reasoning.

    Returns None if nothing is certain before the end: for a user's parser, and if decoding changes spaces.
    """
    tokenizer = context.conversation.tokenizer
    if changes_spaces(tokenizer):
        return None
    form = request.sampling.format
    skips = form is None and (context.parser is None or before is None)
    reader: Reader | None
    if form is not None:
        reader = FormatReader(form)
    elif before is None:
        reader = _Content()
    else:
        reader = text_reader(before) if context.parser is None else context.parser.reader(before)
    if reader is None:
        return None
    decode, single = context.decoder.decode, byte_token_ids(tokenizer)
    text = SettledText(lambda ids: decode(ids, skip_special_tokens=skips), single)
    stops = request.sampling.stop
    gate = StopGate(stops, SettledText(lambda ids: decode(ids, **PLAIN), single)) if stops else None
    piece_of = (lambda token: decode([token], skip_special_tokens=False)) if has_logps else None
    return ChoiceStream(number, text, reader, gate, piece_of, context.stop_ids)
