"""Sessions between programs and engines: order, ends, lost engines and withdrawn requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.processes import frames
from mcore_rl.rollout.gateway import wire
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, HarnessEnd, OpenedSession, RefusedError, Reward
from mcore_rl.rollout.gateway.hub import MAX_OPEN, Hub
from mcore_rl.rollout.gateway.sessions import OpenSession
from mcore_rl.types.chat import ChatMessage

TOKEN = "secret"
ROW = {"row": 3}
SECONDS = 20
ROOM = 3
"""Requests without a session that an engine has at a time."""


class Engine:
    """Engine side of a connection, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *message: object) -> None:
        frames.write(self.writer, message)

    async def next(self) -> Any:
        return await asyncio.wait_for(frames.read(self.reader), SECONDS)

    def reply(self, key: int, name: str) -> None:
        self.send(wire.REPLY, key, ChatReply(name, (), 1, 0))

    async def lose(self) -> None:
        self.writer.close()
        await asyncio.sleep(0.05)


class Site:
    def __init__(self, path: Path) -> None:
        self.hub, self.path = Hub(TOKEN, ROOM), path

    async def engine(self, token: str = TOKEN) -> Engine:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(token.encode())
        return Engine(reader, writer)

    async def taken(self) -> OpenedSession:
        found = await self.hub.take(SECONDS)
        assert found is not None
        return found

    def ask(self, session: str, *texts: str) -> asyncio.Task[ChatReply]:
        return asyncio.create_task(self.hub.answer(session, request(*texts)))


def request(*texts: str) -> ChatRequest:
    messages: list[ChatMessage] = [{"role": "user", "content": text} for text in texts]
    return ChatRequest(messages)


@contextlib.asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Site]:
    site = Site(path)
    server = await asyncio.start_unix_server(site.hub.connected, path)
    try:
        yield site
    finally:
        server.close()


def with_site(test: Callable[[Site], Awaitable[None]], tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(SECONDS), serving(tmp_path / "s") as site:
            await test(site)

    asyncio.run(run())


def test_a_request_reaches_the_engine_of_its_session(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        first, second = await site.engine(), await site.engine()
        first.send(wire.OPEN, "a", ROW)
        second.send(wire.OPEN, "b", ROW)
        names = {(await site.taken()).id, (await site.taken()).id}
        assert names == {"a", "b"}
        asked = site.ask("b", "hello")
        kind, key, session, sent = await second.next()
        assert (kind, session, sent) == (wire.CALL, "b", request("hello"))
        second.reply(key, "r")
        assert (await asked).id == "r"

    with_site(test, tmp_path)


def test_an_engine_without_the_token_is_not_heard(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        stranger = await site.engine("wrong!")
        with contextlib.suppress(ConnectionError):
            stranger.send(wire.OPEN, "a", ROW)
        assert await site.hub.take(0.2) is None

    with_site(test, tmp_path)


def test_the_engine_of_a_session_counts_tokens(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        for session, sent in (("a", "a"), (None, "")):
            counted = asyncio.create_task(site.hub.count(session, request("one")))
            kind, key, name, asked = await engine.next()
            assert (kind, name, asked) == (wire.COUNT, sent, request("one"))
            engine.send(wire.REPLY, key, ChatReply("", (), 7, 0))
            assert await counted == 7
        assert not site.hub._sessions["a"].history, "another engine does not repeat it"
        before = asyncio.create_task(site.hub.count("a", request("one")))
        await engine.next()
        await engine.lose()
        counted = before, asyncio.create_task(site.hub.count("a", request("two")))
        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        for _ in counted:
            other.send(wire.REPLY, (await other.next())[1], ChatReply("", (), 7, 0))
        assert [await each for each in counted] == [7, 7]

    with_site(test, tmp_path)


def test_a_session_is_taken_once_and_keys_differ(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        waiting = [asyncio.create_task(site.hub.take(1.0)) for _ in range(3)]
        engine.send(wire.OPEN, "a", ROW)
        engine.send(wire.OPEN, "b", ROW)
        found = [each for each in await asyncio.gather(*waiting) if each is not None]
        assert {each.id for each in found} == {"a", "b"}
        assert len({each.key for each in found}) == 2
        assert site.hub.key_of("a") != site.hub.key_of("b")
        assert site.hub.key_of("c") is None

    with_site(test, tmp_path)


def test_another_engine_repeats_the_history_in_order(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        key = (await site.taken()).key
        first = site.ask("a", "one")
        engine.reply((await engine.next())[1], "r1")
        assert (await first).id == "r1"
        dropped = site.ask("a", "dropped")
        await engine.next()
        dropped.cancel()
        await site.hub.reward("a", Reward(0.5, "r1"))
        open_request = site.ask("a", "one", "two")
        await asyncio.sleep(0.05)
        await engine.lose()
        while_away = site.ask("a", "three")
        await asyncio.sleep(0.05)

        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        kind, number, _, sent = await other.next()
        assert (kind, sent) == (wire.CALL, request("one"))
        # Nothing follows before the answer: the next request may continue it.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(frames.read(other.reader), 0.2)
        other.reply(number, "r1")
        assert await other.next() == (wire.SKIP, "a", request("dropped"))
        assert await other.next() == (wire.REWARD, "a", Reward(0.5, "r1"))
        for task, texts in ((open_request, ("one", "two")), (while_away, ("three",))):
            kind, number, _, sent = await other.next()
            assert (kind, sent) == (wire.CALL, request(*texts))
            other.reply(number, "new")
            assert (await task).id == "new"
        assert site.hub.key_of("a") == key
        assert await site.hub.take(0.1) is None, "its program still works on it"

    with_site(test, tmp_path)


def test_another_reply_of_the_next_engine_ends_the_session(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        asked = site.ask("a", "one")
        engine.reply((await engine.next())[1], "r1")
        await asked
        await engine.lose()
        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        other.reply((await other.next())[1], "r2")
        kind, _, end, *_ = await other.next()
        assert kind == wire.ENDED
        assert "journal" in end.error
        with pytest.raises(RefusedError, match="has ended"):
            await site.hub.answer("a", request("more"))

    with_site(test, tmp_path)


def test_a_client_that_leaves_aborts_its_own_request_only(tmp_path: Path) -> None:
    """Engines number requests by themselves: after a loss, the old number means another request."""

    async def test(site: Site) -> None:
        engine, other = await site.engine(), await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        other.send(wire.OPEN, "b", ROW)
        await site.taken()
        await site.taken()
        first = site.ask("a", "one")
        assert (await engine.next())[1] == 0
        of_b = site.ask("b", "of b")
        assert (await other.next())[1] == 0
        await engine.lose()
        other.send(wire.OPEN, "a", ROW)
        kind, key, session, _ = await other.next()
        assert (kind, key, session) == (wire.CALL, 1, "a")
        first.cancel()
        assert await other.next() == (wire.CANCEL, 1)
        other.reply(0, "r")
        assert (await of_b).id == "r"

    with_site(test, tmp_path)


def test_refused_requests_are_not_repeated(tmp_path: Path) -> None:
    """Engines do not count them, so that equal later requests keep their seeds."""

    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        asked = site.ask("a", "too long")
        engine.send(wire.REPLY, (await engine.next())[1], wire.Refusal(400, "too long"))
        with pytest.raises(RefusedError):
            await asked
        again = site.ask("a", "short")
        await engine.next()
        await engine.lose()
        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        kind, key, _, sent = await other.next()
        assert (kind, sent) == (wire.CALL, request("short"))
        other.reply(key, "r")
        assert (await again).id == "r"

    with_site(test, tmp_path)


def test_a_session_has_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.rollout.gateway.sessions.MAX_BYTES", 1000)

    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        task = site.ask("a", "x" * 600)
        await engine.next()
        more = site.ask("a", "x" * 600, "short")  # the first message is known
        assert (await engine.next())[3].messages[1]["content"] == "short"
        with pytest.raises(RefusedError) as caught:
            await site.hub.answer("a", request("y" * 600))
        assert caught.value.status == 413
        task.cancel()
        more.cancel()

    with_site(test, tmp_path)


def test_images_count_with_their_bytes_and_are_told_apart() -> None:
    async def test() -> None:
        session = OpenSession("a", "", "", ROW, None, None)
        contents = [[{"type": "image", "image": bytes([n]) * 1000}] for n in (200, 200, 201)]
        asked = [session.asked(ChatRequest([{"role": "user", "content": content}])) for content in contents]
        assert asked[0].digest == asked[1].digest != asked[2].digest
        assert 2000 < session.num_bytes < 2400
        assert asked[1].request.messages[0] is asked[0].request.messages[0]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("call", "status"), [("r", None), ("r:0", None), ("r:1", 400), ("other", 404), ("r:x", 404), ("r:-1", 400)]
)
def test_rewards_name_a_reply(tmp_path: Path, call: str, status: int | None) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        asked = site.ask("a", "one")
        engine.reply((await engine.next())[1], "r")
        await asked
        if status is None:
            await site.hub.reward("a", Reward(1.0, call))
            assert await engine.next() == (wire.REWARD, "a", Reward(1.0, call))
            return
        with pytest.raises(RefusedError) as caught:
            await site.hub.reward("a", Reward(1.0, call))
        assert caught.value.status == status

    with_site(test, tmp_path)


def test_a_session_that_no_engine_opens_again_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.rollout.gateway.hub.REOPEN_SECONDS", 0.1)

    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        asked = site.ask("a", "one")
        await engine.next()
        await engine.lose()
        with pytest.raises(RefusedError, match="has ended") as caught:
            await asked
        assert caught.value.status == 410
        assert site.hub.key_of("a") is None

    with_site(test, tmp_path)


def test_the_end_refuses_open_and_later_requests(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        asked = site.ask("a", "one")
        _, key, *_ = await engine.next()
        end = HarnessEnd({"harness": {"exit_code": 0}})
        await site.hub.end("a", end)
        assert await engine.next() == (wire.ENDED, "a", end, [key], [])
        with pytest.raises(RefusedError):
            await asked
        engine.reply(key, "late")  # a reply after the end is dropped
        engine.send(wire.CLOSE, "a")
        await asyncio.sleep(0.05)
        assert site.hub.key_of("a") is None

    with_site(test, tmp_path)


def test_a_session_has_a_limited_number_of_open_requests(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        tasks = [site.ask("a", str(n)) for n in range(MAX_OPEN)]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError) as caught:
            await site.hub.answer("a", request("one more"))
        assert caught.value.status == 429
        for task in tasks:
            task.cancel()

    with_site(test, tmp_path)


def test_equal_messages_are_stored_once(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        tasks = [site.ask("a", *(f"message {k}" for k in range(n))) for n in range(1, 4)]
        await asyncio.sleep(0.05)
        session = site.hub._sessions["a"]
        messages = [each.request.messages for each in session.history]  # type: ignore[union-attr]
        assert messages[0][0] is messages[1][0] is messages[2][0]
        assert len(session.messages) == 3
        for task in tasks:
            task.cancel()

    with_site(test, tmp_path)
