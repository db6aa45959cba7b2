"""Sessions of a host's gateway: between the server, to which programs connect, and the engines that sample.

The gateway outlives the engines. If an engine is lost, its sessions wait for another engine of the host that opens them
again. It gets the same requests in the same order and answers them from the journal of sampled tokens with the replies
that clients already have, then the open requests. Programs do not notice. A session that no engine opens again ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mcore_rl.processes import frames
from mcore_rl.rollout.gateway import wire
from mcore_rl.rollout.gateway.exchange import (
    ChatReply,
    ChatRequest,
    HarnessEnd,
    OpenedSession,
    RefusedError,
    Reward,
    choice_of,
)
from mcore_rl.rollout.gateway.turns import canonical, hashed
from mcore_rl.types.chat import ChatMessage, ToolSchema

Part = TypeVar("Part")
REOPEN_SECONDS = 120.0
"""Time in which an engine must open a session again whose engine was lost."""
GONE = "the session has ended"
MAX_BYTES = 64 << 20
"""Maximum size of the messages of a session: a conversation of ten million tokens."""
MAX_OPEN = 64
"""Maximum number of unanswered requests of a session."""


@dataclass(eq=False)
class _Asked:
    """A request of a session, and its reply for the client. `reply_id` is known once an engine has answered."""

    request: ChatRequest
    answer: asyncio.Future[ChatReply]
    reply_id: str | None = None
    replied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the reply of the current engine."""
    sent: tuple[_Engine, int] | None = None
    """Engine that has the request, and its key there."""
    is_refused: bool = False

    @property
    def is_dropped(self) -> bool:
        """True if its client has gone before the reply."""
        return self.answer.done() and self.reply_id is None

    def refuse(self) -> None:
        """Keep a mark only: an engine does not count refused requests, and a program may send many large ones."""
        self.is_refused, self.request = True, ChatRequest()


@dataclass(eq=False)
class _Session:
    id: str
    key: str
    owner_key: str
    row: Mapping[str, object]
    owner: _Engine | None
    """Engine that has opened the session; None while it waits for one."""
    engine: _Engine | None
    """Engine that receives new requests: `owner`, or None while the session is played again."""
    history: list[_Asked | Reward] = field(default_factory=list)
    """Requests and rewards in the order in which they arrived, for another engine."""
    messages: dict[bytes, ChatMessage] = field(default_factory=dict)
    """Messages of all requests: each request repeats the conversation, and equal ones are stored once."""
    tools: dict[bytes, Sequence[ToolSchema]] = field(default_factory=dict)
    num_bytes: int = 0
    """Size of messages and tools as JSON."""
    num_open: int = 0
    """Number of unanswered requests."""
    is_taken: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    end: HarnessEnd | None = None
    abandoned: asyncio.TimerHandle | None = None
    replay: asyncio.Task[None] | None = None


class _Engine:
    """Connection of an engine."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._keys = itertools.count()
        self.asked: dict[int, tuple[_Session | None, _Asked]] = {}
        """Open requests by their key; those without a session are served."""

    def call(self, session: _Session, asked: _Asked) -> None:
        """Send a request of a session."""
        self.send(wire.CALL, self._key_of(session, asked), session.id, asked.request)

    def serve(self, asked: _Asked) -> None:
        """Send a request without a session."""
        self.send(wire.SERVE, self._key_of(None, asked), asked.request)

    def cancel(self, key: int) -> None:
        """Abort a request, which gets no reply then."""
        if self.asked.pop(key, None) is not None:
            self.send(wire.CANCEL, key)

    def forget(self, session: _Session) -> None:
        """Forget the requests of a session that has ended."""
        self.asked = {key: entry for key, entry in self.asked.items() if entry[0] is not session}

    def _key_of(self, session: _Session | None, asked: _Asked) -> int:
        key = next(self._keys)
        self.asked[key] = session, asked
        asked.sent = self, key
        return key

    def send(self, *message: object) -> None:
        frames.write(self._writer, message)


class Hub:
    """Implementation of exchange.Sessions. All methods run in one event loop.

    token: first bytes of an engine's connection; others are closed.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._sessions: dict[str, _Session] = {}
        self._engines: set[_Engine] = set()
        self._free: deque[str] = deque()
        """Sessions that wait for a program."""
        self._freed = asyncio.Condition()

    async def answer(self, session: str, request: ChatRequest) -> ChatReply:
        """Same as Sessions.answer."""
        found = self._live(session)
        if found.num_open >= MAX_OPEN:
            raise RefusedError(429, f"the session has {found.num_open} unanswered requests; wait for their replies")
        asked = _Asked(_interned(found, request), asyncio.get_running_loop().create_future())
        found.history.append(asked)
        if found.engine is not None:
            found.engine.call(found, asked)
        found.num_open += 1
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._cancel(asked)
            raise
        finally:
            found.num_open -= 1

    async def serve(self, request: ChatRequest) -> ChatReply:
        """Same as Sessions.serve. The engine with the fewest open requests answers."""
        if not self._engines:
            raise RefusedError(503, "no engine is ready; try again")
        engine = min(self._engines, key=lambda engine: len(engine.asked))
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        engine.serve(asked)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._cancel(asked)
            raise

    @staticmethod
    def _cancel(asked: _Asked) -> None:
        if asked.sent is not None:
            engine, key = asked.sent
            engine.cancel(key)

    async def reward(self, session: str, reward: Reward) -> None:
        """Same as Sessions.reward."""
        found = self._live(session)
        _check_call(found, reward)
        found.history.append(reward)
        if found.engine is not None:
            found.engine.send(wire.REWARD, session, reward)

    async def end(self, session: str, end: HarnessEnd) -> None:
        """Same as Sessions.end."""
        self._end(self._live(session), end)

    async def take(self, seconds: float) -> OpenedSession | None:
        """Same as Sessions.take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._freed:
                while (found := self._next_free()) is None:
                    await self._freed.wait()
                found.is_taken = True
                return OpenedSession(found.id, found.key, found.owner_key, found.row)
        return None

    async def closed(self, session: str, seconds: float) -> bool:
        """Same as Sessions.closed."""
        if (found := self._sessions.get(session)) is None:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(found.closed.wait(), seconds)
        return found.closed.is_set()

    def key_of(self, session: str) -> str | None:
        """Same as Sessions.key_of."""
        found = self._sessions.get(session)
        return None if found is None else found.key

    def owner_key_of(self, session: str) -> str | None:
        """Same as Sessions.owner_key_of."""
        found = self._sessions.get(session)
        return None if found is None else found.owner_key

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of an engine until it ends."""
        engine = _Engine(writer)
        try:
            # IncompleteReadError: the connection ended inside the token.
            with contextlib.suppress(EOFError, ConnectionError, asyncio.IncompleteReadError):
                # Nothing is unpickled before the sender is known.
                token = await reader.readexactly(len(self._token))
                if hmac.compare_digest(token, self._token.encode()):
                    await self._serve(engine, reader)
        finally:
            self._lose(engine)
            writer.close()

    async def _serve(self, engine: _Engine, reader: asyncio.StreamReader) -> None:
        """Handle the messages of an engine until its connection ends."""
        self._engines.add(engine)
        while True:
            match await frames.read(reader):
                case (wire.OPEN, str(session), row):
                    await self._open(engine, session, row)
                case (wire.REPLY, int(key), reply):
                    self._replied(engine, key, reply)
                case (wire.CLOSE, str(session)):
                    self._close(engine, session)

    async def _open(self, engine: _Engine, session: str, row: Mapping[str, object]) -> None:
        found = self._sessions.get(session)
        if found is not None and found.abandoned is not None:
            found.abandoned.cancel()
            found.abandoned, found.owner = None, engine
            found.replay = asyncio.create_task(self._play_again(engine, found))
            return
        # A row may be played again, for example in the next epoch; its earlier session has ended then.
        if found is not None:
            self._close(found.owner, session)
        key, owner_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._sessions[session] = _Session(session, key, owner_key, row, engine, engine)
        async with self._freed:
            self._free.append(session)
            self._freed.notify()

    async def _play_again(self, engine: _Engine, session: _Session) -> None:
        """Send the history of a session to another engine. The next request may continue a reply, so requests that were
        answered are answered again one by one."""
        for each in session.history:  # grows meanwhile
            if isinstance(each, Reward):
                engine.send(wire.REWARD, session.id, each)
            elif each.is_refused:
                continue
            elif each.is_dropped:
                engine.send(wire.SKIP, session.id, each.request)
            else:
                each.replied.clear()
                engine.call(session, each)
                if each.reply_id is not None:
                    await each.replied.wait()
        session.engine, session.replay = engine, None
        if session.end is not None:
            engine.send(wire.ENDED, session.id, session.end)

    def _replied(self, engine: _Engine, key: int, reply: ChatReply | wire.Refusal) -> None:
        if key not in engine.asked:  # it was cancelled, or its session has ended
            return
        session, asked = engine.asked.pop(key)
        asked.replied.set()
        if (
            session is not None
            and asked.reply_id is not None
            and not (isinstance(reply, ChatReply) and reply.id == asked.reply_id)
        ):
            # Its client has another reply, on which it may have acted.
            self._end(session, HarnessEnd(error="an engine was lost, and its journal does not have the last replies"))
        elif isinstance(reply, ChatReply):
            asked.reply_id = reply.id
        else:
            asked.refuse()
        if asked.answer.done():  # the client has gone, or has this reply from the engine that was lost
            return
        if isinstance(reply, ChatReply):
            asked.answer.set_result(reply)
        else:
            asked.answer.set_exception(RefusedError(reply.status, reply.text, reply.code))

    def _end(self, session: _Session, end: HarnessEnd) -> None:
        session.end = end
        session.closed.set()
        self._refuse_open(session)
        if session.engine is not None:
            session.engine.send(wire.ENDED, session.id, end)

    def _close(self, engine: _Engine | None, session: str) -> None:
        found = self._sessions.get(session)
        if found is not None and found.owner is engine:
            del self._sessions[session]
            if found.replay is not None:
                found.replay.cancel()
            if engine is not None:
                engine.forget(found)
            found.closed.set()
            self._refuse_open(found)

    def _lose(self, engine: _Engine) -> None:
        self._engines.discard(engine)
        for session_of, asked in engine.asked.values():
            if session_of is None and not asked.answer.done():
                asked.answer.set_exception(RefusedError(503, "the engine was lost; try again"))
        loop = asyncio.get_running_loop()
        for session in self._sessions.values():
            if session.owner is engine:
                if session.replay is not None:
                    session.replay.cancel()
                session.owner = session.engine = session.replay = None
                session.abandoned = loop.call_later(REOPEN_SECONDS, self._close, None, session.id)

    def _refuse_open(self, session: _Session) -> None:
        for each in session.history if session.num_open else ():
            if isinstance(each, _Asked) and not each.answer.done():
                each.answer.set_exception(RefusedError(410, GONE))
                each.answer.exception()  # asyncio warns about errors that nobody has read

    def _next_free(self) -> _Session | None:
        while self._free:
            found = self._sessions.get(self._free.popleft())
            if found is not None and not found.is_taken and found.end is None:
                return found
        return None

    def _live(self, session: str) -> _Session:
        found = self._sessions.get(session)
        if found is None or found.end is not None:
            raise RefusedError(410, GONE)
        return found


def _check_call(session: _Session, reward: Reward) -> None:
    """Raise RefusedError unless a reward's call is a reply of the session, with the number of one of its choices."""
    if reward.call is None:
        return
    replies = {each.reply_id: each.request.num_choices for each in session.history if isinstance(each, _Asked)}
    try:
        name, number = choice_of(reward.call)
    except ValueError:
        name, number = "", 0
    if name not in replies:
        raise RefusedError(404, f"the session has no reply {reward.call}")
    if not 0 <= number < replies[name] or (replies[name] > 1 and ":" not in reward.call):
        raise RefusedError(400, f"reply {name} has {replies[name]} choices; name one as {name}:NUMBER, from 0")


def _interned(session: _Session, request: ChatRequest) -> ChatRequest:
    """Return the request with messages and tools of earlier requests where they are equal.

    Raises: RefusedError if the session becomes too large.
    """
    messages = [_kept(session, session.messages, each, each) for each in request.messages]
    tools = None if request.tools is None else _kept(session, session.tools, request.tools, list(request.tools))
    return replace(request, messages=messages, tools=tools)


def _kept(session: _Session, kept: dict[bytes, Part], part: Part, value: object) -> Part:
    """Return the kept part that is equal, or keep this one. value: the part as JSON."""
    text = canonical(value)
    digest = hashed(text)
    if digest not in kept:
        if session.num_bytes + len(text) > MAX_BYTES:
            raise RefusedError(413, f"the session's messages have more than {MAX_BYTES >> 20} MiB")
        session.num_bytes += len(text)
        kept[digest] = part
    return kept[digest]
