"""Conversations of earlier replies, which requests of /v1/responses continue by the id of the reply."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from mcore_rl.types.chat import ChatMessage

MIN_SESSIONS = 16
"""Number of sessions below which no conversation is dropped."""
MAX_REPLIES = 64
"""Maximum number of replies per session that can be continued; the oldest are forgotten."""


class Histories:
    """Conversations by session and reply.

    Conversations of a session share equal messages: a client that sends its whole conversation with every request takes
    linear, not quadratic memory.

    is_open: True for a session that has not ended. Conversations of ended sessions are dropped when the number of
    sessions has doubled.
    """

    def __init__(self, is_open: Callable[[str], bool]) -> None:
        self._is_open = is_open
        self._sessions: dict[str, OrderedDict[str, tuple[ChatMessage, ...]]] = {}
        self._limit = MIN_SESSIONS
        """Number of sessions at which ended ones are dropped. A look at all for every new one takes quadratic time."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, session: str, reply: str) -> Sequence[ChatMessage] | None:
        """Return the conversation that ends with a reply, None if it is unknown or forgotten."""
        kept = self._sessions.get(session)
        return None if kept is None else kept.get(reply)

    def keep(self, session: str, reply: str, messages: Sequence[ChatMessage]) -> None:
        """Keep the conversation that ends with a reply."""
        if session not in self._sessions and len(self._sessions) >= self._limit:
            self._sessions = {name: kept for name, kept in self._sessions.items() if self._is_open(name)}
            self._limit = max(MIN_SESSIONS, 2 * len(self._sessions))
        kept = self._sessions.setdefault(session, OrderedDict())
        latest = next(reversed(kept.values()), ())
        shared = [old if old == new else new for old, new in zip(latest, messages, strict=False)]
        kept[reply] = (*shared, *messages[len(shared) :])
        if len(kept) > MAX_REPLIES:
            kept.popitem(last=False)
