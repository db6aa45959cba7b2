"""Texts of replies between engine and client: lost engines, repeated requests and slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.rollout.gateway import answering, wire
from mcore_rl.rollout.gateway.answering import Answering
from mcore_rl.rollout.gateway.dialects import completions, messages
from mcore_rl.rollout.gateway.exchange import ChatReply, Choice, RefusedError
from mcore_rl.rollout.gateway.progress import ProgressReceiver, ReplyProgress, ReplyStart, TextDelta
from tests.unit.rollout.counted_text import CountedText
from tests.unit.rollout.gateway.test_hub import ROW, Site, request, with_site

START = ReplyStart("r1", 1, 0)


def texts(progress: ReplyProgress) -> list[str]:
    return [delta.text for delta in progress.deltas]


def at(start: int, text: str, first_token: int = 0, tokens: Sequence[tuple[str, float]] = ()) -> TextDelta:
    return TextDelta(0, "content", start, text, first_token, tokens)


def test_a_repeated_reply_adds_only_new_text_and_tokens() -> None:
    progress = ReplyProgress()
    tokens = [(text, -1.0) for text in ("Go", "od", " day")]
    assert progress.add(START, [at(0, "Good", 0, tokens[:2])])
    assert progress.add(replace(START, created=9), [at(0, "Go", 0, tokens[:1]), at(2, "od d", 1, tokens[1:])])
    assert progress.add(START, [at(6, "ay", 3)])
    assert texts(progress) == ["Good", " d", "ay"]
    assert [token for delta in progress.deltas for token in delta.tokens] == tokens
    assert progress.start == START


@pytest.mark.parametrize("size", [1, 7])
def test_a_repeated_reply_compares_each_character_once(size: int) -> None:
    progress, text = ReplyProgress(), "abcdefgh" * 100
    assert progress.add(START, [at(start, CountedText(text[start : start + 5])) for start in range(0, 800, 5)])
    CountedText.reset()
    assert progress.add(START, [at(start, text[start : start + size]) for start in range(0, 800, size)])
    assert CountedText.num_copied == 800
    assert not progress.add(START, [at(795, "defgX")])


@pytest.mark.parametrize(
    ("start", "delta"),
    [
        (START, at(2, "x")),
        (START, at(0, "Goodx y")),
        (START, at(9, "x")),
        (replace(START, id="r2"), at(4, "x")),
    ],
)
def test_another_reply_is_not_added(start: ReplyStart, delta: TextDelta) -> None:
    progress = ReplyProgress()
    assert progress.add(START, [at(0, "Good d")])
    assert not progress.add(start, [delta])
    assert texts(progress) == ["Good d"]


def test_a_reply_that_goes_on_with_the_other_kind_is_not_added() -> None:
    """The client has content where the other engine has reasoning."""
    progress, content = ReplyProgress(), TextDelta(0, "content", 3, "Good")
    reasoning = TextDelta(0, "reasoning", 0, "Hm.")
    assert progress.add(START, [reasoning, content])
    assert progress.add(START, [reasoning, replace(content, text="Go")])
    assert not progress.add(START, [replace(reasoning, text="Hm. Hm.")])
    assert not progress.add(START, [replace(content, kind="reasoning")])
    assert texts(progress) == ["Hm.", "Good"]


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_resampled_reply_ends_its_stream_and_not_its_session(tmp_path: Path, is_complete: bool) -> None:
    """The reply is aborted. If it is complete already, it is not trained."""

    async def test(site: Site) -> None:
        engine, found = await site.engine(), list[ReplyProgress]()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        asked = asyncio.create_task(site.hub.answer("a", replace(request("one"), stream=True), receiver=found.append))
        key = (await engine.next())[1]
        engine.send(wire.PROGRESS, [(key, START, [at(0, "Goo")]), (key, START, None), (key, START, [at(3, "s")])])
        with pytest.raises(RefusedError, match="sampled the reply again") as caught:
            await asked
        assert (caught.value.status, texts(found[0])) == (503, ["Goo"])
        assert await engine.next() == (wire.CANCEL, key)
        if is_complete:
            engine.reply(key, "r1")
            assert await engine.next() == (wire.SEEN, "a", "r1", False)
        else:
            engine.send(wire.REPLY, key, None)
        more = site.ask("a", "two")
        engine.reply((await engine.next())[1], "r2")
        assert (await more).id == "r2"
        await engine.lose()
        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        kind, *_, sent = await other.next()  # counted, so that equal later requests keep their seeds
        assert (kind, sent.messages) == (wire.CALL if is_complete else wire.SKIP, request("one").messages)

    with_site(test, tmp_path)


@pytest.mark.parametrize("again", [None, [at(0, "Bad")]])
def test_a_served_reply_that_differs_ends_its_stream(tmp_path: Path, again: list[TextDelta] | None) -> None:
    async def test(site: Site) -> None:
        engine = await site.engine()
        asked = asyncio.create_task(site.hub.serve(replace(request("one"), stream=True)))
        key = (await engine.next())[1]
        engine.send(wire.PROGRESS, [(key, START, [at(0, "Goo")]), (key, START, again)])
        with pytest.raises(RefusedError, match="another reply" if again else "sampled the reply again"):
            await asked
        assert await engine.next() == (wire.CANCEL, key)

    with_site(test, tmp_path)


@pytest.mark.parametrize("again", ["Good", "Bad"])
def test_a_stream_continues_on_another_engine_or_ends(tmp_path: Path, again: str) -> None:
    """The engine that repeats the request begins with the text that its client has, or the session ends."""

    async def test(site: Site) -> None:
        engine, found = await site.engine(), list[ReplyProgress]()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        asked = asyncio.create_task(site.hub.answer("a", replace(request("one"), stream=True), receiver=found.append))
        key = (await engine.next())[1]
        engine.send(wire.PROGRESS, [(key, START, [at(0, "Goo")]), (99, START, [at(0, "late")])])
        await engine.lose()
        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        key = (await other.next())[1]
        other.send(wire.PROGRESS, [(key, START, [at(0, again)])])
        if again == "Bad":
            with pytest.raises(RefusedError, match="has ended"):
                await asked
            assert "journal" in (await other.next())[2].error
            return
        other.reply(key, "r1")
        assert (await asked).id == "r1"
        assert texts(found[0]) == ["Goo", "d"]

    with_site(test, tmp_path)


def test_a_retry_gets_the_text_of_its_first_attempt(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine, found = await site.engine(), list[ReplyProgress]()
        engine.send(wire.OPEN, "a", ROW)
        await site.taken()
        streamed = replace(request("one"), stream=True)
        first = asyncio.create_task(site.hub.answer("a", streamed, receiver=found.append))
        key = (await engine.next())[1]
        engine.send(wire.PROGRESS, [(key, START, [at(0, "Goo")])])
        await asyncio.sleep(0.05)
        retried = asyncio.create_task(site.hub.answer("a", streamed, retried=True, receiver=found.append))
        await asyncio.sleep(0)
        first.cancel()
        engine.send(wire.PROGRESS, [(key, START, [at(3, "d")])])
        engine.reply(key, "r1")
        assert (await retried).id == "r1"
        assert texts(found[1]) == ["Goo", "d"]

    with_site(test, tmp_path)


class Connection:
    """Connection whose client reads when `reads` is set."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.reads = asyncio.Event()
        self.left = asyncio.Event()

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message.get("body", b""))
        await self.reads.wait()


def sampled(text: str) -> ChatReply:
    return ChatReply("r1", [Choice(text, "", (), "stop", [], [], [])], 1, 0)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_slow_reader_gets_few_large_events(leaves: bool) -> None:
    """Sampling does not wait for it."""

    async def test() -> None:
        connection, ended, missed = Connection(), list[str](), list[ChatReply]()

        async def answer(receiver: ProgressReceiver) -> ChatReply:
            progress = ReplyProgress()
            receiver(progress)
            for number in range(1000):
                assert progress.add(START, [at(number, "z")])
                await asyncio.sleep(0)
            ended.append("sampled")
            if not leaves:  # the client reads again before the reply is complete
                while b"".join(connection.sent).count(b"z") < 1000:
                    await asyncio.sleep(0)
            return sampled("z" * 1000)

        async def miss(reply: ChatReply) -> None:
            missed.append(reply)

        call = completions.read({"prompt": "q", "stream": True}, "tiny", lambda _: None)
        response = asyncio.create_task(
            Answering(completions.DIALECT, call, answer, miss)({}, connection.receive, connection.send)
        )
        while not ended:
            await asyncio.sleep(0)
        assert len(connection.sent) == 1, "the client has not read the beginning"
        if leaves:
            connection.left.set()
            await asyncio.sleep(0)
        connection.reads.set()
        await response
        assert [reply.id for reply in missed] == (["r1"] if leaves else [])
        assert leaves or b"".join(connection.sent).count(b"z") == 1000
        assert len(connection.sent) < 8

    asyncio.run(test())


def test_reasoning_that_a_client_does_not_get_keeps_it_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "PING_SECONDS", 0.05)

    async def test() -> None:
        connection = Connection()
        connection.reads.set()

        async def answer(receiver: ProgressReceiver) -> ChatReply:
            progress = ReplyProgress()
            receiver(progress)
            for number in range(500):
                assert progress.add(START, [TextDelta(0, "reasoning", number, "z")])
                await asyncio.sleep(0.01)
                if any(b"event: ping" in chunk for chunk in connection.sent[-1:]):
                    return ChatReply("r1", [Choice("x", "z" * (number + 1), (), "stop", [], [], [])], 1, 0)
            raise AssertionError("no ping was sent")

        async def miss(reply: ChatReply) -> None:
            raise AssertionError("the client received the reply")

        asked: Any = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9, "stream": True}
        call = messages.read(asked, "tiny", lambda _: None)
        await Answering(messages.DIALECT, call, answer, miss)({}, connection.receive, connection.send)
        assert b"zz" not in b"".join(connection.sent)
        assert b"message_stop" in b"".join(connection.sent)

    asyncio.run(test())


def test_a_reply_that_differs_from_its_stream_is_missed() -> None:
    async def test() -> None:
        connection, missed = Connection(), list[ChatReply]()
        connection.reads.set()

        async def answer(receiver: ProgressReceiver) -> ChatReply:
            progress = ReplyProgress()
            receiver(progress)
            assert progress.add(START, [at(0, "x")])
            while b'"x"' not in b"".join(connection.sent):
                await asyncio.sleep(0)
            return sampled("other")

        async def miss(reply: ChatReply) -> None:
            missed.append(reply)

        call = completions.read({"prompt": "q", "stream": True}, "tiny", lambda _: None)
        await Answering(completions.DIALECT, call, answer, miss)({}, connection.receive, connection.send)
        assert b"another text" in b"".join(connection.sent)
        assert [reply.id for reply in missed] == ["r1"]

    asyncio.run(test())


def test_a_client_that_leaves_amid_its_stream_cancels_the_request() -> None:
    async def test() -> None:
        connection, cancelled = Connection(), list[bool]()
        connection.reads.set()

        async def answer(receiver: ProgressReceiver) -> ChatReply:
            progress = ReplyProgress()
            receiver(progress)
            assert progress.add(START, [at(0, "x")])
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.append(True)
            return sampled("x")

        async def miss(reply: ChatReply) -> None:
            raise AssertionError("the reply is not complete")

        call = completions.read({"prompt": "q", "stream": True}, "tiny", lambda _: None)
        response = asyncio.create_task(
            Answering(completions.DIALECT, call, answer, miss)({}, connection.receive, connection.send)
        )
        while b"x" not in b"".join(connection.sent):
            await asyncio.sleep(0)
        connection.left.set()
        await response
        assert cancelled == [True]

    asyncio.run(test())
