"""State of the hub: sessions with their requests, and connections of engines."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mcore_rl.data.chat.messages import message_images
from mcore_rl.processes import frames
from mcore_rl.rollout.gateway import wire
from mcore_rl.rollout.gateway.digests import canonical, hashed
from mcore_rl.rollout.gateway.exchange import (
    RESAMPLED,
    ChatReply,
    ChatRequest,
    HarnessEnd,
    RefusedError,
    Reward,
    choice_of,
)
from mcore_rl.rollout.gateway.progress import ReplyProgress
from mcore_rl.types.chat import ChatMessage, ToolSchema

Part = TypeVar("Part")
MAX_BYTES = 64 << 20
"""Maximum size of the messages of a session: a conversation of ten million tokens."""
OTHER_REPLY = "the engine was lost or sleeps, and another one samples another reply; try again"
KEPT_REPLIES = 4
"""Number of replies per session that a repeated request can get. A client repeats a request within seconds."""

MAX_LOST = 2
"""Number of lost engines after which a request without a session is refused."""


@dataclass(eq=False)
class AskedRequest:
    """A request of a session, and its reply for the client. `reply_id` is known once an engine has answered."""

    request: ChatRequest
    digest: bytes
    """Equal for equal requests."""
    answer: asyncio.Future[ChatReply]
    reply_id: str | None = None
    reply: ChatReply | None = None
    """Kept for a client that repeats the request, while it is among the last KEPT_REPLIES."""
    replied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the current engine has answered or aborted the request."""
    sent: tuple[EngineConnection, int] | None = None
    """Engine that has the request, and its key there."""
    num_clients: int = 1
    """Number of clients that wait for the reply."""
    is_seen: bool = True
    """False if the reply is complete, but its client left before it was sent."""
    is_refused: bool = False
    reply_digest: str = ""
    progress: ReplyProgress | None = None
    """Texts of a streamed reply until it is complete."""

    @property
    def is_dropped(self) -> bool:
        """True if its clients have gone before the reply was complete."""
        return not self.num_clients and self.reply_id is None and not self.is_refused

    def settle(self, result: ChatReply | RefusedError | None) -> None:
        """Give the clients a reply or an error; None: nobody waits."""
        self.replied.set()
        self.progress = None
        if self.answer.done():  # the clients have this reply from an engine that was lost, or the session has ended
            return
        if isinstance(result, ChatReply):
            self.answer.set_result(result)
        elif result is None:
            self.answer.cancel()
        else:
            self.answer.set_exception(result)
            self.answer.exception()  # asyncio warns about errors that nobody has read

    def break_off(self, *, is_resampled: bool) -> None:
        """Refuse a request whose clients have the beginning of another reply than is sampled now.
        is_resampled: by the same engine. Nobody gets the reply, so that it is not trained."""
        self.num_clients = 0
        self.settle(RefusedError(503, RESAMPLED if is_resampled else OTHER_REPLY))

    def refuse(self) -> None:
        """Keep a mark only: an engine does not count refused requests, and a program may send many large ones."""
        self.is_refused, self.request = True, ChatRequest()


def asked_request(request: ChatRequest, digest: bytes = b"") -> AskedRequest:
    """Return a new request."""
    progress = ReplyProgress() if request.stream else None
    return AskedRequest(request, digest, asyncio.get_running_loop().create_future(), progress=progress)


@dataclass(eq=False)
class ServedRequest(AskedRequest):
    """A request without a session. If its engine is lost, another one gets it."""

    call: wire.ServedCall | None = None
    """None: only the tokens of its prompt are counted."""
    num_lost: int = 0
    """Number of engines that died while they had the request."""

    def survives(self, engine: EngineConnection) -> bool:
        """Return whether another engine may have the request after `engine` was lost; if not, refuse it."""
        if engine.is_leaving:
            return True
        self.num_lost += 1
        if self.num_lost >= MAX_LOST:
            text = f"{MAX_LOST} engines died with this request, which may be the reason; see the log of the server"
            self.settle(RefusedError(503, text))
            return False
        if self.call is not None and engine.journal is not None:
            self.call = replace(self.call, journals=(*self.call.journals, engine.journal))
        return True


@dataclass(eq=False)
class OpenSession:
    """A session of the hub."""

    id: str
    key: str
    owner_key: str
    row: Mapping[str, object]
    owner: EngineConnection | None
    """Engine that has opened the session; None while it waits for one."""
    engine: EngineConnection | None
    """Engine that receives new requests: `owner`, or None while the session is played again."""
    history: list[AskedRequest | Reward] = field(default_factory=list)
    """Requests and rewards in the order in which they arrived, for another engine."""
    answered: dict[str, AskedRequest] = field(default_factory=dict)
    """Answered requests by the ids of their replies."""
    replies: deque[AskedRequest] = field(default_factory=deque)
    """Last answered requests, whose replies are kept."""
    open: list[AskedRequest] = field(default_factory=list)
    """Unanswered requests."""
    messages: dict[bytes, ChatMessage] = field(default_factory=dict)
    """Messages of all requests: each request repeats the conversation, and equal ones are stored once."""
    tools: dict[bytes, Sequence[ToolSchema]] = field(default_factory=dict)
    num_bytes: int = 0
    """Size of messages and tools as JSON, with the bytes of images."""
    num_open: int = 0
    """Number of unanswered requests."""
    is_taken: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    end: HarnessEnd | None = None
    is_diverged: bool = False
    """True if another engine has replayed the session with other replies than its clients have."""
    abandoned: asyncio.TimerHandle | None = None
    replay: asyncio.Task[None] | None = None

    def asked(self, request: ChatRequest) -> AskedRequest:
        """Return a new request, with messages and tools of earlier requests where they are equal.

        Raises: RefusedError if the session becomes too large.
        """
        digests = [
            self._keep(self.messages, each, canonical(each), sum(map(len, message_images(each))))
            for each in request.messages
        ]
        tools = None
        if request.tools is not None:
            tools = self._keep(self.tools, request.tools, canonical(list(request.tools)))
        options = [request.prompt, dict(request.sampling), request.num_choices, request.top_logprobs, request.role]
        options.append(request.schema)
        digest = hashed(b"".join([*digests, b"|", tools or b"", canonical(options)]))
        messages = [self.messages[each] for each in digests]
        stored = replace(request, messages=messages, tools=None if tools is None else self.tools[tools])
        return asked_request(stored, digest)

    def earlier(self, digest: bytes, *, retried: bool) -> AskedRequest | None:
        """Return the last equal request that a new one repeats: one whose client has left, or with `retried` any whose
        reply is open or kept."""
        waiting = (each for each in self.open if not each.answer.done())
        equal = [each for each in (*self.replies, *waiting) if each.digest == digest]
        left = [each for each in equal if not each.is_seen or not (each.num_clients or each.reply_id)]
        found = left or (equal if retried else [])
        return found[-1] if found else None

    def keep_reply(self, asked: AskedRequest, reply: ChatReply) -> None:
        """Keep the reply of a request for clients that repeat it."""
        asked.reply, asked.reply_id, asked.reply_digest = reply, reply.id, reply.digest
        self.answered[reply.id] = asked
        self.replies.append(asked)
        if len(self.replies) > KEPT_REPLIES:
            self.replies.popleft().reply = None

    def check_call(self, reward: Reward) -> None:
        """Raise RefusedError unless a reward's call is a reply of the session, with the number of one of its
        choices."""
        if reward.call is None:
            return
        try:
            name, number = choice_of(reward.call)
        except ValueError:
            name, number = "", 0
        if name not in self.answered:
            raise RefusedError(404, f"the session has no reply {reward.call}")
        choices = self.answered[name].request.num_choices
        if not 0 <= number < choices or (choices > 1 and ":" not in reward.call):
            raise RefusedError(400, f"reply {name} has {choices} choices; name one as {name}:NUMBER, from 0")

    @property
    def unseen(self) -> list[str]:
        """Ids of complete replies that no client has received."""
        asked = (each for each in self.history if isinstance(each, AskedRequest) and not each.is_seen)
        return [each.reply_id for each in asked if each.reply_id is not None]

    def refuse_open(self, error: RefusedError) -> None:
        """Refuse all unanswered requests."""
        for each in self.open:
            each.settle(error)

    def _keep(self, kept: dict[bytes, Part], part: Part, text: bytes, image_bytes: int = 0) -> bytes:
        """Keep a part unless an equal one is kept, and return its digest. text: its canonical text. image_bytes: size
        of its images."""
        digest, size = hashed(text), len(text) + image_bytes
        if digest not in kept:
            if self.num_bytes + size > MAX_BYTES:
                raise RefusedError(413, f"the session's messages have more than {MAX_BYTES >> 20} MiB")
            self.num_bytes += size
            kept[digest] = part
        return digest


class EngineConnection:
    """Connection of an engine."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._keys = itertools.count()
        self.asked: dict[int, tuple[OpenSession | None, AskedRequest]] = {}
        """Open requests by their key; those without a session are served."""
        self.journal: str | None = None
        """File with the tokens that the engine samples."""
        self.is_leaving = False
        """True if the engine closes its connection because it will sleep."""

    def call(self, session: OpenSession, asked: AskedRequest) -> None:
        """Send a request of a session."""
        self.send(wire.CALL, self._key_of(session, asked), session.id, asked.request)

    def serve(self, asked: ServedRequest) -> None:
        """Send a request without a session."""
        if asked.call is None:
            self.count("", asked)
        else:
            self.send(wire.SERVE, self._key_of(None, asked), asked.call, asked.request)

    def count(self, session: str, asked: AskedRequest) -> None:
        """Send a request whose tokens are counted."""
        self.send(wire.COUNT, self._key_of(None, asked), session, asked.request)

    def cancel(self, key: int) -> bool:
        """Abort a request; False if this engine does not have it. The engine replies with None, or with the reply if
        it is complete already."""
        if key not in self.asked:
            return False
        self.send(wire.CANCEL, key)
        return True

    def end(self, session: OpenSession, end: HarnessEnd) -> None:
        """Send the end of a session, with its requests and replies that no client receives."""
        keys = [key for key, (of_key, _) in self.asked.items() if of_key is session]
        self.send(wire.ENDED, session.id, end, keys, session.unseen)

    def forget(self, session: OpenSession) -> None:
        """Forget the requests of a session that has ended."""
        self.asked = {key: entry for key, entry in self.asked.items() if entry[0] is not session}

    def _key_of(self, session: OpenSession | None, asked: AskedRequest) -> int:
        key = next(self._keys)
        self.asked[key] = session, asked
        asked.sent = self, key
        return key

    def send(self, *message: object) -> None:
        frames.write(self._writer, message)
