"""Sessions with scripted replies, and a real server for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mcore_rl.data.chat.messages import chat_call, text_of
from mcore_rl.rollout.gateway.app import application
from mcore_rl.rollout.gateway.exchange import (
    ChatReply,
    ChatRequest,
    Choice,
    FinishReason,
    HarnessEnd,
    OpenedSession,
    RefusedError,
    Reward,
)
from mcore_rl.rollout.gateway.progress import ProgressReceiver, ReplyProgress, ReplyStart, TextDelta
from mcore_rl.types.chat import ChatCall
from tests.http_server import serving_application

KEY = "key-of-s1"
OWNER_KEY = "owner-key-of-s1"
ADMIN = "token-of-the-run"
MODEL = "tiny"
LIMIT = 4 * 2**20

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def choice(
    content: str = "",
    reasoning: str = "",
    calls: tuple[ChatCall, ...] = (),
    *,
    logps: bool = False,
    reason: str = "stop",
) -> Choice:
    """Return a choice whose tokens are the words of its text between special tokens."""
    pieces = ["<think>", *_words(reasoning), "</think>"] if reasoning else []
    pieces += [*_words(content), *("<call>" for _ in calls), "<end>"]
    finish: FinishReason = "tool_calls" if calls else "length" if reason == "length" else "stop"
    logp = [-0.25 * number for number in range(len(pieces))]
    return Choice(
        content=content,
        reasoning=reasoning,
        calls=calls,
        finish_reason=finish,
        token_ids=list(range(len(pieces))),
        logp=logp,
        pieces=pieces if logps else (),
        stop=reason if reason not in ("stop", "length") else None,
    )


async def _stream(reply: ChatReply, receiver: ProgressReceiver) -> None:
    """Send the words of the choices in turn, except for the last word."""
    progress = ReplyProgress()
    receiver(progress)
    start = ReplyStart(reply.id, reply.num_prompt_tokens, reply.created)
    for number, choice in enumerate(reply.choices):
        sent = length = 0
        for kind, text in (("reasoning", choice.reasoning), ("content", choice.content)):
            for word in filter(None, _words(text) if kind == "reasoning" else _words(text)[:-1]):
                place = choice.pieces.index(word, sent) + 1 if choice.pieces else 0
                tokens = list(zip(choice.pieces[sent:place], choice.logp[sent:place], strict=True))
                assert progress.add(start, [TextDelta(number, kind, length, word, sent, tokens)])  # type: ignore[arg-type]
                length, sent = length + len(word), max(sent, place)
                await asyncio.sleep(0)


def _words(text: str) -> list[str]:
    words = text.split(" ")
    return [word if place == 0 else f" {word}" for place, word in enumerate(words)]


def adding(number: int = 0) -> ChatCall:
    """Return a call of the tool `add` with an argument that is not ASCII."""
    return chat_call("add", {"a": 2, "b": 3, "unit": "µm"}, f"call_{number}")


@dataclass
class ScriptedSessions:
    """Answers by the last message: with a call if tools are shown and nothing was called yet, with the tool's result
    after a call, and otherwise with a fixed text."""

    requests: list[ChatRequest] = field(default_factory=list)
    rewards: list[tuple[str, Reward]] = field(default_factory=list)
    ends: list[tuple[str, HarnessEnd]] = field(default_factory=list)
    refusal: RefusedError | None = None
    failure: Exception | None = None
    breaks: RefusedError | None = None
    """Error in the middle of a stream."""
    seconds: float = 0.0
    num_cancelled: int = 0
    retried: list[bool] = field(default_factory=list)
    missed_replies: list[tuple[str, str]] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=lambda: {"s1": KEY, "s2": "key-of-s2"})

    async def answer(
        self, session: str, request: ChatRequest, *, retried: bool = False, receiver: ProgressReceiver | None = None
    ) -> ChatReply:
        self.requests.append(request)
        self.retried.append(retried)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.refusal or self.failure:
            raise self.refusal or self.failure or AssertionError
        choices = [self._choice(request) for _ in range(request.num_choices)]
        reply = ChatReply(f"reply-{len(self.requests)}", choices, num_prompt_tokens=11, created=1_700_000_000)
        if receiver is not None and request.stream:
            await _stream(reply, receiver)
            if self.breaks:
                await asyncio.sleep(0.05)
                raise self.breaks
        return reply

    def _choice(self, request: ChatRequest) -> Choice:
        logps = request.top_logprobs is not None
        if request.prompt is not None:
            return choice(" and so on", logps=logps, reason="length")
        last = request.messages[-1]
        if last["role"] == "tool":
            return choice(f"The sum is {text_of(last)}.", "Now I know.", logps=logps)
        if request.tools:
            return choice("Let me see.", "I need the tool.", (adding(0), adding(1)), logps=logps)
        return choice("Good day — to you!", "Be polite.", logps=logps)

    async def count(self, session: str | None, request: ChatRequest) -> int:
        if self.refusal:
            raise self.refusal
        return 10 * len(request.messages) + len(request.tools or ())

    async def missed(self, session: str, reply: str) -> None:
        self.missed_replies.append((session, reply))

    async def reward(self, session: str, reward: Reward) -> None:
        self.rewards.append((session, reward))

    async def end(self, session: str, end: HarnessEnd) -> None:
        self.ends.append((session, end))

    async def take(self, seconds: float) -> OpenedSession | None:
        if seconds:
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            return None
        return OpenedSession("s1", KEY, OWNER_KEY, {"question": "2 + 3?"})

    async def closed(self, session: str, seconds: float) -> bool:
        await asyncio.sleep(min(seconds, 0.01))
        return any(ended == session for ended, _ in self.ends)

    async def serve(self, request: ChatRequest, *, receiver: ProgressReceiver | None = None) -> ChatReply:
        return await self.answer("", request, receiver=receiver)

    def owner_key_of(self, session: str) -> str | None:
        return None if session not in self.keys else f"owner-{self.keys[session]}"

    def key_of(self, session: str) -> str | None:
        return self.keys.get(session)


@contextmanager
def serving(sessions: ScriptedSessions, admin_token: str | None = ADMIN, *, serves: bool = False) -> Iterator[str]:
    """Serve the sessions on a loopback port. Yields the server's address."""
    app = application(sessions, model=MODEL, admin_token=admin_token, max_body_bytes=LIMIT, serves=serves)
    with serving_application(app, lifespan="off") as url:
        yield url
