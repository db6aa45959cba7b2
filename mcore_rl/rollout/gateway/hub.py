"""Sessions of a host's gateway: between the server, to which programs connect, and the engines that sample.

The gateway outlives the engines. If an engine is lost, its sessions wait for another engine of the host that opens them
again. It gets the same requests in the same order and answers them from the journal of sampled tokens with the replies
that clients already have, then the open requests. Programs do not notice. A session that no engine opens again ends.

A request without a session waits until an engine has room. If its engine is lost, another one continues it from the
journal; a request that has lost
MAX_LOST engines is refused, because it may be the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from mcore_rl.processes import frames
from mcore_rl.rollout.gateway import wire
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, HarnessEnd, OpenedSession, RefusedError, Reward
from mcore_rl.rollout.gateway.progress import ProgressReceiver, ReplyProgress, ReplyStart, TextDelta
from mcore_rl.rollout.gateway.sessions import (
    AskedRequest,
    EngineConnection,
    OpenSession,
    ServedRequest,
    asked_request,
)

REOPEN_SECONDS = 120.0
"""Time in which an engine must open a session again whose engine was lost."""
GONE = "the session has ended"
LOOK_SECONDS = 0.1
"""Interval of looks for another engine."""
MAX_SEED = 2**63
MAX_OPEN = 64
"""Maximum number of unanswered requests of a session."""


class EngineLostError(RefusedError):
    """The engine was lost that counted the tokens of a request."""


class Hub:
    """Implementation of exchange.Sessions. All methods run in one event loop.

    token: first bytes of an engine's connection; others are closed. room: maximum number of requests without a session
    that an engine has at a time.
    """

    def __init__(self, token: str, room: int = sys.maxsize) -> None:
        self._token, self._room = token, room
        self._sessions: dict[str, OpenSession] = {}
        self._engines: set[EngineConnection] = set()
        self._free: deque[str] = deque()
        """Sessions that wait for a program."""
        self._waiting: dict[ServedRequest, None] = {}
        """Requests without a session that wait for an engine: first requests of lost engines, then the others in the
        order of their arrival."""
        self._freed = asyncio.Condition()

    async def answer(
        self, session: str, request: ChatRequest, *, retried: bool = False, receiver: ProgressReceiver | None = None
    ) -> ChatReply:
        """Same as Sessions.answer."""
        found = self._live(session)
        if found.num_open >= MAX_OPEN:
            raise RefusedError(429, f"the session has {found.num_open} unanswered requests; wait for their replies")
        asked = found.asked(request)
        found.num_open += 1
        try:
            while (earlier := found.earlier(asked.digest, retried=retried)) is not None:
                if earlier.num_clients or earlier.reply is not None:
                    return await self._joined(found, earlier, receiver)
                await earlier.replied.wait()  # it is aborted, unless its reply is already complete
                self._live(session)
            found.history.append(asked)
            found.open.append(asked)
            if found.engine is not None:
                found.engine.call(found, asked)
            return await self._awaited(found, asked, receiver)
        finally:
            found.num_open -= 1
            found.open = [each for each in found.open if not each.answer.done()]

    async def _joined(self, session: OpenSession, asked: AskedRequest, receiver: ProgressReceiver | None) -> ChatReply:
        """Wait for the reply to an earlier request of the same client."""
        asked.num_clients += 1
        if not asked.is_seen:
            self._mark(session, asked, is_seen=True)
        return await self._awaited(session, asked, receiver)

    async def _awaited(
        self, session: OpenSession | None, asked: AskedRequest, receiver: ProgressReceiver | None = None
    ) -> ChatReply:
        if asked.reply is not None:
            return asked.reply
        if receiver is not None and asked.progress is not None:
            receiver(asked.progress)
        try:
            return await asyncio.shield(asked.answer)
        except asyncio.CancelledError:
            self._leave(session, asked)
            raise

    def _leave(self, session: OpenSession | None, asked: AskedRequest) -> None:
        """Note that a client has left before the reply. Without another client, the request is aborted."""
        asked.num_clients = max(0, asked.num_clients - 1)  # 0 already after break_off
        if asked.num_clients:
            return
        if asked.reply_id is not None:
            if session is not None:
                self._mark(session, asked, is_seen=False)
        elif asked.sent is None or not asked.sent[0].cancel(asked.sent[1]):
            asked.settle(None)
            if isinstance(asked, ServedRequest):
                self._waiting.pop(asked, None)

    @staticmethod
    def _mark(session: OpenSession, asked: AskedRequest, *, is_seen: bool) -> None:
        """Tell the engine whether a client has received a reply. An engine that plays the session again learns it at
        the end of the session."""
        asked.is_seen = is_seen
        if session.engine is not None and session.end is None:
            session.engine.send(wire.SEEN, session.id, asked.reply_id, is_seen)

    async def missed(self, session: str, reply: str) -> None:
        """Same as Sessions.missed."""
        found = self._sessions.get(session)
        if found is not None and reply in found.answered:
            self._leave(found, found.answered[reply])

    async def serve(self, request: ChatRequest, *, receiver: ProgressReceiver | None = None) -> ChatReply:
        """Same as Sessions.serve. The engine with the fewest open requests answers."""
        name, seed = f"serve.{secrets.token_hex(8)}", secrets.randbelow(MAX_SEED)
        return await self._served(request, wire.ServedCall(name, seed), receiver)

    async def _served(
        self, request: ChatRequest, call: wire.ServedCall | None, receiver: ProgressReceiver | None = None
    ) -> ChatReply:
        answer: asyncio.Future[ChatReply] = asyncio.get_running_loop().create_future()
        progress = ReplyProgress() if request.stream else None
        asked = ServedRequest(request, b"", answer, progress=progress, call=call)
        self._assign(asked)
        return await self._awaited(None, asked, receiver)

    def _assign(self, asked: ServedRequest) -> None:
        """Send a request without a session to an engine, or let it wait for one. Counts need no room."""
        if asked.call is None and self._engines:
            self._least_busy().serve(asked)
        else:
            self._waiting[asked] = None
            self._hand_out()

    def _least_busy(self) -> EngineConnection:
        return min(self._engines, key=lambda engine: len(engine.asked))

    def _hand_out(self) -> None:
        """Send waiting requests to the engines that have room."""
        while self._waiting and self._engines and len((engine := self._least_busy()).asked) < self._room:
            asked = next(iter(self._waiting))
            del self._waiting[asked]
            engine.serve(asked)

    def _hand_out_all(self) -> None:
        """Send waiting requests after engines have connected or were lost: also counts, which need no room."""
        self._hand_out()
        if self._engines:
            for asked in [each for each in self._waiting if each.call is None]:
                del self._waiting[asked]
                self._least_busy().serve(asked)

    async def count(self, session: str | None, request: ChatRequest) -> int:
        """Same as Sessions.count."""
        if session is None:
            return (await self._served(request, None)).num_prompt_tokens
        while True:
            while (engine := self._live(session).engine) is None:  # another engine plays the session again
                await asyncio.sleep(LOOK_SECONDS)
            asked = asked_request(request)
            engine.count(session, asked)
            with contextlib.suppress(EngineLostError):
                return (await self._awaited(None, asked)).num_prompt_tokens

    async def reward(self, session: str, reward: Reward) -> None:
        """Same as Sessions.reward."""
        found = self._live(session)
        found.check_call(reward)
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
        engine = EngineConnection(writer)
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

    async def _serve(self, engine: EngineConnection, reader: asyncio.StreamReader) -> None:
        """Handle the messages of an engine until its connection ends."""
        self._engines.add(engine)
        self._hand_out_all()
        while True:
            match await frames.read(reader):
                case (wire.JOURNAL, str(path)):
                    engine.journal = path
                case (wire.LEAVE,):
                    engine.is_leaving = True
                    self._engines.discard(engine)
                case (wire.OPEN, str(session), row):
                    await self._open(engine, session, row)
                case (wire.PROGRESS, list(entries)):
                    for key, start, deltas in entries:
                        self._progressed(engine, key, start, deltas)
                case (wire.REPLY, int(key), reply):
                    self._replied(engine, key, reply)
                case (wire.CLOSE, str(session)):
                    self._close(engine, session)

    async def _open(self, engine: EngineConnection, session: str, row: Mapping[str, object]) -> None:
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
        self._sessions[session] = OpenSession(session, key, owner_key, row, engine, engine)
        async with self._freed:
            self._free.append(session)
            self._freed.notify()

    async def _play_again(self, engine: EngineConnection, session: OpenSession) -> None:
        """Send the history of a session to another engine. The next request may continue a reply, so requests that were
        answered are answered again one by one. Stops at a reply that differs: rewards name replies by their ids."""
        for each in session.history:  # grows meanwhile
            if session.is_diverged:
                break
            if isinstance(each, Reward):
                engine.send(wire.REWARD, session.id, each)
            elif each.is_refused:
                continue
            elif each.is_dropped or (session.end is not None and each.reply_id is None):
                engine.send(wire.SKIP, session.id, each.request)
            else:
                each.replied.clear()
                engine.call(session, each)
                if each.reply_id is not None:
                    await each.replied.wait()
        session.engine, session.replay = engine, None
        for each in session.history:
            if isinstance(each, AskedRequest) and not each.is_seen:
                self._mark(session, each, is_seen=False)
        if session.end is not None:
            engine.end(session, session.end)

    def _progressed(
        self, engine: EngineConnection, key: int, start: ReplyStart, deltas: Sequence[TextDelta] | None
    ) -> None:
        """Handle new texts of a reply. Those of a reply that is complete may arrive late. None: see TextReceiver."""
        session, asked = engine.asked.get(key, (None, None))
        if asked is None or asked.progress is None or (deltas is not None and asked.progress.add(start, deltas)):
            return
        if session is not None and deltas is not None:
            self._diverge(session)
        else:
            asked.break_off(is_resampled=deltas is None)
            engine.cancel(key)

    def _diverge(self, session: OpenSession) -> None:
        """End a session that was played again with other replies than its clients have, on which they may have
        acted."""
        session.is_diverged = True
        self._end(session, HarnessEnd(error="an engine was lost, and its journal does not have the last replies"))

    def _replied(self, engine: EngineConnection, key: int, reply: ChatReply | wire.Refusal | None) -> None:
        """Handle a reply; None: the request was aborted."""
        if key not in engine.asked:  # its session has ended
            return
        session, asked = engine.asked.pop(key)
        self._hand_out()
        is_known = isinstance(reply, ChatReply) and (reply.id, reply.digest) == (asked.reply_id, asked.reply_digest)
        if session is not None and asked.reply_id is not None and not is_known:
            self._diverge(session)
        elif session is not None and session.end is None and isinstance(reply, ChatReply) and not is_known:
            session.keep_reply(asked, reply)
            if not asked.num_clients:
                self._mark(session, asked, is_seen=False)
        elif isinstance(reply, wire.Refusal):
            asked.refuse()
        if isinstance(reply, wire.Refusal):
            asked.settle(RefusedError(reply.status, reply.text, reply.code))
        else:
            asked.settle(reply if reply is not None or not asked.num_clients else RefusedError(410, GONE))

    def _end(self, session: OpenSession, end: HarnessEnd) -> None:
        session.end = end
        session.closed.set()
        session.refuse_open(RefusedError(410, GONE))
        if session.engine is not None:
            session.engine.end(session, end)

    def _close(self, engine: EngineConnection | None, session: str) -> None:
        found = self._sessions.get(session)
        if found is not None and found.owner is engine:
            del self._sessions[session]
            if found.replay is not None:
                found.replay.cancel()
            if engine is not None:
                engine.forget(found)
            found.closed.set()
            found.refuse_open(RefusedError(410, GONE))

    def _lose(self, engine: EngineConnection) -> None:
        self._engines.discard(engine)
        left = list(engine.asked.values())
        engine.asked.clear()
        again = list[ServedRequest]()
        for session_of, asked in left:
            if isinstance(asked, ServedRequest) and asked.num_clients and not asked.answer.done():
                if asked.survives(engine):
                    again.append(asked)
            elif session_of is None and asked.num_clients:
                asked.settle(EngineLostError(503, "the engine was lost; try again"))
            elif asked.is_dropped:
                asked.settle(None)
        loop = asyncio.get_running_loop()
        if again:
            self._waiting = dict.fromkeys(again) | self._waiting
            # Engines that died together are lost one by one: a request should not lose several of them.
            loop.call_later(LOOK_SECONDS, self._hand_out_all)
        for session in self._sessions.values():
            if session.owner is engine:
                if session.replay is not None:
                    session.replay.cancel()
                session.owner = session.engine = session.replay = None
                session.abandoned = loop.call_later(REOPEN_SECONDS, self._close, None, session.id)

    def _next_free(self) -> OpenSession | None:
        while self._free:
            found = self._sessions.get(self._free.popleft())
            if found is not None and not found.is_taken and found.end is None:
                return found
        return None

    def _live(self, session: str) -> OpenSession:
        found = self._sessions.get(session)
        if found is None or found.end is not None:
            raise RefusedError(410, GONE)
        return found
