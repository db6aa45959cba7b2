"""Engine's side of the connection to its host's gateway."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from mcore_rl.config.functions import describe
from mcore_rl.errors import WorkerDiedError
from mcore_rl.processes import frames
from mcore_rl.rollout.gateway import wire
from mcore_rl.rollout.gateway.answers import Answers
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, HarnessEnd, RefusedError, Reward
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta
from mcore_rl.rollout.gateway.wire import GatewayAddress, ServedCall

NO_CALL = ServedCall("count", 0)
"""Call of requests that sample nothing."""


class Serving(Protocol):
    """Answers to requests without a session."""

    async def answers(self, call: ServedCall) -> Answers:
        """Return the answers of one request."""

    def end(self, call: ServedCall) -> None:
        """Release what is kept of a request, after its reply was sent or its client has left."""

    def fail(self, error: Exception) -> None:
        """Handle an error that has ended the connection. The engine never connects again."""


class _Open:
    """An open session: its answers, and its end. A request without a session has one of its own, with its `call`
    instead of answers, which are made when it runs."""

    def __init__(self, made: Answers | ServedCall) -> None:
        self._made = made
        self.ended: asyncio.Future[HarnessEnd] = asyncio.get_running_loop().create_future()
        self.running: dict[int, asyncio.Task[None]] = {}
        self.replies: dict[int, str] = {}
        """Ids of complete replies. The gateway may abort a request while its reply is on the way."""

    @property
    def call(self) -> ServedCall | None:
        return self._made if isinstance(self._made, ServedCall) else None

    @property
    def answers(self) -> Answers:
        assert not isinstance(self._made, ServedCall)
        return self._made


class GatewayLink:
    """Connection of an engine to a gateway, on the event loop of the engine's episodes. All sessions share it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serving: Serving) -> None:
        self._reader, self._writer, self._serving = reader, writer, serving
        self._sessions: dict[str, _Open] = {}
        self._session_of: dict[int, _Open] = {}
        self._counts: dict[int, asyncio.Task[None]] = {}
        """Running counts of tokens: the processing of their images must not hold up other sessions."""
        self._texts: list[tuple[int, ReplyStart, Sequence[TextDelta] | None]] = []
        """New texts of streamed replies, which are sent together. None: see TextReceiver."""
        self._lost: Exception | None = None
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, address: GatewayAddress, serving: Serving, journal: str | None = None) -> GatewayLink:
        """Connect to the gateway of this host. `serving` answers requests without a session. `journal`: file with the
        tokens that the engine samples."""
        reader, writer = await asyncio.open_unix_connection(address.socket)
        writer.write(address.token.encode())
        if journal is not None:
            frames.write(writer, (wire.JOURNAL, journal))
        return cls(reader, writer, serving)

    @contextlib.asynccontextmanager
    async def session(
        self, name: str, row: Mapping[str, object], answers: Answers
    ) -> AsyncIterator[asyncio.Future[HarnessEnd]]:
        """Serve a session in a block; yields its end. The end of the block cuts it: open requests are cancelled.

        Raises: WorkerDiedError when the gateway is lost; the first error of the engine. The end has the error.
        """
        if self._lost is not None:
            raise self._lost
        opened = self._sessions[name] = _Open(answers)
        frames.write(self._writer, (wire.OPEN, name, dict(row)))
        try:
            yield opened.ended
        finally:
            del self._sessions[name]
            tasks = list(opened.running.values())
            for task in tasks:
                task.cancel()
            # Each removes what it has sampled from the episode, whose result follows.
            await asyncio.gather(*tasks, return_exceptions=True)
            for key in (*opened.running, *opened.replies):  # a task that had not begun is still among the running
                del self._session_of[key]
            if self._lost is None:
                frames.write(self._writer, (wire.CLOSE, name))

    async def close(self) -> None:
        """Close the connection of an engine that will sleep, after all sessions have ended. Requests without a session
        are aborted: another engine, or this one when it is awake, samples them from the beginning."""
        served = [task for opened in self._session_of.values() for task in opened.running.values()]
        tasks = [self._task, *self._counts.values(), *served]
        if self._lost is None:
            frames.write(self._writer, (wire.LEAVE,))
        self._lost = self._lost or WorkerDiedError("the engine has left the gateway")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer.close()

    async def _receive(self) -> None:
        try:
            while True:
                await self._handle(await frames.read(self._reader))
        except (EOFError, ConnectionError):
            self._lose(WorkerDiedError("the gateway of this host has ended"))
        except Exception as error:  # otherwise all sessions would wait for their time limits
            self._lose(error)
            self._serving.fail(error)
            raise

    async def _handle(self, message: Sequence[object]) -> None:
        """Handle a message of the gateway."""
        match message:
            case (wire.CALL, int(key), str(session), ChatRequest() as request) if session in self._sessions:
                await self._call(key, self._sessions[session], request)
            case (wire.SERVE, int(key), ServedCall() as call, ChatRequest() as request):
                await self._call(key, _Open(call), request)
            case (wire.COUNT, int(key), str(session), ChatRequest() as request):
                self._counts[key] = asyncio.create_task(self._count(key, self._sessions.get(session), request))
            case _:
                # The tasks of earlier requests begin first. One that is cancelled before would send no reply, and
                # another engine counts requests in the order of their arrival.
                await asyncio.sleep(0)
                await self._handle_note(message)

    async def _handle_note(self, message: Sequence[object]) -> None:
        """Handle a message that has no reply."""
        match message:
            case (wire.CANCEL, int(key)):
                self._cancel(key)
            case (wire.ENDED, str(session), HarnessEnd() as end, list(keys), list(replies)) if (
                session in self._sessions
            ):
                self._end(self._sessions[session], end, keys, replies)
            case (str(kind), str(session), *fields) if session in self._sessions:
                await self._note(kind, self._sessions[session], fields)

    def _cancel(self, key: int) -> None:
        """Abort a request. If its reply is complete, no client receives it."""
        if key in self._counts:
            self._counts[key].cancel()
        elif (opened := self._session_of.get(key)) is None:
            return
        elif key in opened.running:
            opened.running[key].cancel()
        else:
            opened.answers.mark(opened.replies[key], is_seen=False)

    def _end(self, opened: _Open, end: HarnessEnd, keys: Sequence[int], replies: Sequence[str]) -> None:
        """End a session. No client receives the replies to `keys`, nor the complete `replies`."""
        for key in keys:
            self._cancel(key)
        for reply in replies:
            opened.answers.mark(reply, is_seen=False)
        self._settle(opened, end)

    async def _count(self, key: int, opened: _Open | None, request: ChatRequest) -> None:
        """Reply with the number of a prompt's tokens. An error refuses the request only."""
        reply: object = None
        try:
            answers = await self._serving.answers(NO_CALL) if opened is None else opened.answers
            reply = ChatReply("", (), await answers.count(request), 0)
        except RefusedError as error:
            reply = wire.Refusal(error.status, str(error), error.code)
        except Exception as error:
            reply = wire.Refusal(500, f"the tokens cannot be counted: {describe(error)}")
        finally:
            del self._counts[key]
            if self._lost is None:
                frames.write(self._writer, (wire.REPLY, key, reply))

    async def _note(self, kind: str, opened: _Open, fields: Sequence[object]) -> None:
        """Handle a message that has no reply. An error ends its session only."""
        try:
            match kind, *fields:
                case wire.SKIP, ChatRequest() as request:
                    await opened.answers.skip(request)
                case wire.REWARD, Reward() as reward:
                    opened.answers.reward(reward)
                case wire.SEEN, str(reply), bool(is_seen):
                    opened.answers.mark(reply, is_seen=is_seen)
        except Exception as error:
            self._settle(opened, error)

    def _lose(self, error: Exception) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._writer.close()
        for opened in self._sessions.values():
            self._settle(opened, error)

    async def _call(self, key: int, opened: _Open, request: ChatRequest) -> None:
        opened.running[key] = asyncio.create_task(self._answer(key, opened, request))
        self._session_of[key] = opened
        if request.num_choices > 1:
            # The task begins, and then the tasks of its choices, before later requests: they are counted in the order
            # of their arrival.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _answer(self, key: int, opened: _Open, request: ChatRequest) -> None:
        try:
            await self._reply(key, opened, request)
        except asyncio.CancelledError:
            if self._lost is None:
                frames.write(self._writer, (wire.REPLY, key, None))
            raise
        # The engine has died. The gateway gives all its requests to another one, which has its journal.
        except WorkerDiedError as error:
            self._lose(error)
        # Errors of the engine, and the withdrawal of the episode, end the episode and not only the request.
        except BaseException as error:
            if self._lost is None:
                frames.write(self._writer, (wire.REPLY, key, wire.Refusal(500, f"the engine failed: {error}")))
            if opened.call is None:  # nobody else waits for the end of a single request
                self._settle(opened, error)
        finally:
            del opened.running[key]
            if key not in opened.replies:
                del self._session_of[key]
            if opened.call is not None:
                self._serving.end(opened.call)

    async def _reply(self, key: int, opened: _Open, request: ChatRequest) -> None:
        try:
            progress = functools.partial(self._progressed, key) if request.stream else None
            answers = opened.answers if opened.call is None else await self._serving.answers(opened.call)
            reply = await answers.answer(request, progress)
        except RefusedError as error:
            frames.write(self._writer, (wire.REPLY, key, wire.Refusal(error.status, str(error), error.code)))
        else:
            if opened.call is None:
                opened.replies[key] = reply.id
            frames.write(self._writer, (wire.REPLY, key, reply))

    def _progressed(self, key: int, start: ReplyStart, deltas: Sequence[TextDelta] | None) -> None:
        """Send new texts of a reply, together with texts of other replies; a TextReceiver."""
        if not self._texts:
            asyncio.get_running_loop().call_soon(self._send_texts)
        self._texts.append((key, start, deltas))

    def _send_texts(self) -> None:
        texts, self._texts = self._texts, []
        if self._lost is None:
            frames.write(self._writer, (wire.PROGRESS, texts))

    @staticmethod
    def _settle(opened: _Open, end: HarnessEnd | BaseException) -> None:
        if opened.ended.done():
            return
        if isinstance(end, BaseException):
            opened.ended.set_exception(end)
        else:
            opened.ended.set_result(end)
