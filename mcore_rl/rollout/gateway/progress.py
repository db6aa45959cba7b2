"""Beginning of a reply that is being sampled, on its way from the engine to the client."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mcore_rl.rollout.tools.turn_reader import Kind

TokenLogp = tuple[str, float]
"""Text of a sampled token and its log-probability in nats."""


@dataclass(frozen=True)
class ReplyStart:
    """Fields of a ChatReply that are known before it is sampled."""

    id: str
    num_prompt_tokens: int
    created: int


@dataclass(frozen=True)
class TextDelta:
    """New text of a choice of a reply.

    number: of the choice, from 0.
    start: number of characters of the choice's texts, of both kinds, before the new ones.
    tokens: sampled tokens up to here since the last delta of the choice; empty unless log-probabilities are requested.
    first_token: number of the choice's tokens before them.
    """

    number: int
    kind: Kind
    start: int
    text: str
    first_token: int = 0
    tokens: Sequence[TokenLogp] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def after(self, num_characters: int, num_tokens: int) -> TextDelta:
        """Return the part after the first characters and tokens of the choice."""
        text, tokens = self.text[max(0, num_characters - self.start) :], self.tokens
        tokens = tokens[max(0, num_tokens - self.first_token) :]
        start, first = max(self.start, num_characters), max(self.first_token, num_tokens)
        return replace(self, start=start, text=text, first_token=first, tokens=tokens)


TextReceiver = Callable[[ReplyStart, Sequence[TextDelta] | None], None]
"""Receiver of the new texts of a reply. None: tokens of earlier texts were sampled again and differ, so that the reply
will be another one."""


@dataclass(eq=False)
class ReplyProgress:
    """Texts of a reply so far. Clients read them at their own speed, and several may read the same reply.

    changed: called after new texts.
    """

    start: ReplyStart | None = None
    deltas: list[TextDelta] = field(default_factory=list)
    changed: list[Callable[[], None]] = field(default_factory=list)
    _known: defaultdict[int, list[TextDelta]] = field(default_factory=lambda: defaultdict(list))
    """Deltas by the number of the choice, each of which begins where the last one ends."""
    _tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, start: ReplyStart, deltas: Sequence[TextDelta]) -> bool:
        """Add texts from an engine. Another engine that repeats the reply begins with texts that are known.

        Returns False if the reply is another one, or differs from the known texts.
        """
        if self.start is not None and self.start.id != start.id:
            return False
        self.start = self.start or start
        for delta in deltas:
            known = self._known[delta.number]
            end = known[-1].end if known else 0
            if delta.start > end or not _repeats(delta, known):
                return False
            new = delta.after(end, self._tokens[delta.number])
            if new.text or new.tokens:
                self.deltas.append(new)
                known.append(new)
            self._tokens[delta.number] = max(self._tokens[delta.number], new.first_token + len(new.tokens))
        for notify in self.changed:
            notify()
        return True


def _repeats(delta: TextDelta, known: Sequence[TextDelta]) -> bool:
    """Return True if the beginning of a delta is the text of known ones at its place, of the same kind."""
    # A lost engine may have sent a delta per token, which another one repeats: each is compared with its own part only.
    first = max(0, bisect_right(known, delta.start, key=lambda each: each.start) - 1)
    for place in range(first, len(known)):
        each = known[place]
        if each.start >= delta.end:
            break
        begin, end = max(each.start, delta.start), min(each.end, delta.end)
        if begin < end and each.kind != delta.kind:
            return False
        if each.text[begin - each.start : end - each.start] != delta.text[begin - delta.start : end - delta.start]:
            return False
    return True


ProgressReceiver = Callable[[ReplyProgress], None]
"""Called with the progress of the reply to a streamed request, when it is known."""


def joined(deltas: Sequence[TextDelta]) -> Iterator[TextDelta]:
    """Join neighbours of the same choice and kind: a client that reads slowly gets few large deltas."""
    run: list[TextDelta] = []
    for delta in deltas:
        if run and (run[0].number, run[0].kind) != (delta.number, delta.kind):
            yield _one(run)
            run = []
        run.append(delta)
    if run:
        yield _one(run)


def _one(run: Sequence[TextDelta]) -> TextDelta:
    tokens = [token for delta in run for token in delta.tokens]
    return replace(run[0], text="".join(delta.text for delta in run), tokens=tokens)
