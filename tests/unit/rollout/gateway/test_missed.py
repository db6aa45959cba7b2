"""Replies whose clients left: equal requests get them, and others are not trained."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.gateway import wire
from mcore_rl.rollout.gateway.answers import Answers
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.exchange import ChatReply, HarnessEnd, RefusedError, Reward
from mcore_rl.rollout.gateway.link import GatewayLink
from tests.unit.rollout.episodes.conftest import QUESTION, SetUp
from tests.unit.rollout.gateway.scripted import KEY, ScriptedSessions
from tests.unit.rollout.gateway.test_answers import Play, ask, counts_up, played, said, user
from tests.unit.rollout.gateway.test_hub import ROW, Engine, Site, request, with_site

__all__ = ["played"]

BODY = {"messages": QUESTION}
HEADERS = {"authorization": f"Bearer {KEY}"}


async def opened(site: Site) -> Engine:
    engine = await site.engine()
    engine.send(wire.OPEN, "a", ROW)
    await site.taken()
    return engine


async def left_at(site: Site, engine: Engine, reply: ChatReply | None) -> None:
    """Ask "one" and leave. The engine has completed the reply at this time, or (None) aborts it."""
    asked = site.ask("a", "one")
    _, key, *_ = await engine.next()
    asked.cancel()
    assert await engine.next() == (wire.CANCEL, key)
    engine.send(wire.REPLY, key, reply)


def test_an_equal_request_gets_the_reply_that_its_client_missed(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await opened(site)
        await left_at(site, engine, ChatReply("r1", (), 1, 0))
        assert await engine.next() == (wire.SEEN, "a", "r1", False)
        assert (await site.ask("a", "one")).id == "r1"
        assert await engine.next() == (wire.SEEN, "a", "r1", True)
        site.ask("a", "one")  # the program asks for another sample
        assert (await engine.next())[0] == wire.CALL

    with_site(test, tmp_path)


def test_an_equal_request_waits_until_the_first_is_aborted(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await opened(site)
        first = site.ask("a", "one")
        _, key, *_ = await engine.next()
        first.cancel()
        again = site.ask("a", "one")
        assert await engine.next() == (wire.CANCEL, key)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(again), 0.1)
        engine.send(wire.REPLY, key, None)
        kind, key, *_ = await engine.next()
        assert kind == wire.CALL
        engine.reply(key, "r2")
        assert (await again).id == "r2"

    with_site(test, tmp_path)


def test_a_retry_of_a_client_gets_the_reply_of_its_first_attempt(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await opened(site)
        first = site.ask("a", "one")
        _, key, *_ = await engine.next()
        # The server has not noticed yet that the first connection is closed.
        retried = asyncio.create_task(site.hub.answer("a", request("one"), retried=True))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        engine.reply(key, "r1")
        assert (await retried).id == "r1"
        assert (await site.hub.answer("a", request("one"), retried=True)).id == "r1"
        other = asyncio.create_task(site.hub.answer("a", request("other"), retried=True))
        kind, key, *_ = await engine.next()
        assert kind == wire.CALL, "a retry without a first attempt is sampled"
        engine.reply(key, "r2")
        assert (await other).id == "r2"

    with_site(test, tmp_path)


def test_agents_do_not_share_a_missed_reply(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await opened(site)
        solver = asyncio.create_task(site.hub.answer("a", replace(request("one"), role="solver")))
        _, key, *_ = await engine.next()
        solver.cancel()
        await engine.next()
        engine.reply(key, "r1")
        assert await engine.next() == (wire.SEEN, "a", "r1", False)
        critic = asyncio.create_task(site.hub.answer("a", replace(request("one"), role="critic")))
        kind, key, _, sent = await engine.next()
        assert (kind, sent.role) == (wire.CALL, "critic")
        engine.reply(key, "r2")
        assert (await critic).id == "r2"

    with_site(test, tmp_path)


def test_another_engine_is_told_which_replies_were_missed(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await opened(site)
        await left_at(site, engine, ChatReply("r1", (), 1, 0))
        assert await engine.next() == (wire.SEEN, "a", "r1", False)
        await site.hub.reward("a", Reward(1.0))
        await engine.lose()
        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        kind, key, *_ = await other.next()
        assert kind == wire.CALL
        other.reply(key, "r1")
        assert await other.next() == (wire.REWARD, "a", Reward(1.0))
        assert await other.next() == (wire.SEEN, "a", "r1", False)

    with_site(test, tmp_path)


def test_an_ended_session_is_replayed_with_its_missed_replies(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await opened(site)
        await left_at(site, engine, ChatReply("r1", (), 1, 0))
        await engine.next()
        refused = site.ask("a", "two")
        _, key, *_ = await engine.next()
        await site.hub.end("a", HarnessEnd())
        assert await engine.next() == (wire.ENDED, "a", HarnessEnd(), [key], ["r1"])
        engine.reply(key, "late")
        with pytest.raises(RefusedError):
            await refused
        await engine.lose()
        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        other.reply((await other.next())[1], "r1")
        assert await other.next() == (wire.SKIP, "a", request("two")), "its client was refused"
        assert await other.next() == (wire.ENDED, "a", HarnessEnd(), [], ["r1"])

    with_site(test, tmp_path)


def test_a_request_left_while_its_engine_is_lost_is_skipped(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        engine = await opened(site)
        first = site.ask("a", "one")
        await engine.next()
        first.cancel()
        await asyncio.sleep(0)
        await engine.lose()
        again = site.ask("a", "one")
        other = await site.engine()
        other.send(wire.OPEN, "a", ROW)
        assert await other.next() == (wire.SKIP, "a", request("one"))
        kind, key, *_ = await other.next()
        assert kind == wire.CALL
        other.reply(key, "r2")
        assert (await again).id == "r2"

    with_site(test, tmp_path)


def test_missed_replies_are_not_trained(played: Play) -> None:
    async def client(answers: Answers) -> None:
        first = await ask(answers, *QUESTION)
        history = [*QUESTION, said(first.choices[0])]
        extended = await ask(answers, *history, user("missed"))
        answers.mark(extended.id, is_seen=False)
        alone = await ask(answers, user("also missed"))
        answers.mark(alone.id, is_seen=False)
        seen = await ask(answers, user("late"))
        answers.mark(seen.id, is_seen=False)
        answers.mark(seen.id, is_seen=True)
        await ask(answers, *history, user("and?"))
        answers.drop_missed()
        assert answers.counts.missed == 2

    done = played(client, counts_up)
    assert not any("missed" in text for text in done.texts())
    assert done.trained() == ["reply 0<|im_end|>", "reply 0<|im_end|>", "reply 1<|im_end|>"]
    assert done.outcome.turns == 3
    assert done.outcome.text == "reply 0\nreply 0\nreply 1"
    assert [message["content"] for message in done.outcome.messages or ()] == ["q", "reply 0", "and?", "reply 1"]


def test_an_episode_without_a_received_reply_names_the_cause(stage: SetUp) -> None:
    class Link:
        @contextlib.asynccontextmanager
        async def session(self, name: str, row: object, answers: Answers) -> AsyncIterator[asyncio.Future[HarnessEnd]]:
            reply = await ask(answers, *QUESTION)
            answers.mark(reply.id, is_seen=False)
            end = asyncio.get_running_loop().create_future()
            end.set_result(HarnessEnd())
            yield end

    (outcome,) = stage(counts_up, GatewayEpisode(RolloutConfig(), cast(GatewayLink, Link()))).play()
    assert outcome.error is not None
    assert "gateway_missed=1" in outcome.error


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_missed_turns_of_a_conversation_are_removed_whole(played: Play, order: tuple[int, int]) -> None:
    async def client(answers: Answers) -> None:
        first = await ask(answers, user("q"))
        history = [user("q"), said(first.choices[0]), user("two")]
        second = await ask(answers, *history)
        third = await ask(answers, *history, said(second.choices[0]), user("three"))
        # Python orders the strings of a set by their hashes.
        answers._missed = dict.fromkeys([(second.id, third.id)[number] for number in order])  # type: ignore[assignment]
        answers.drop_missed()

    done = played(client, counts_up)
    assert done.texts() == ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nreply 0<|im_end|>"]


def test_choices_of_a_request_that_is_aborted_are_not_trained(played: Play) -> None:
    async def client(answers: Answers) -> None:
        generate, ended = answers.session.generate, asyncio.Event()

        async def second_hangs(*arguments: Any, **named: Any) -> Any:
            is_second = ended.is_set()
            sampled = await generate(*arguments, **named)
            ended.set()
            if is_second:
                await asyncio.sleep(60)
            return sampled

        answers.session.generate = second_hangs  # type: ignore[method-assign]
        both = asyncio.create_task(ask(answers, *QUESTION, num_choices=2))
        await ended.wait()
        await asyncio.sleep(0)
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        answers.session.generate = generate  # type: ignore[method-assign]
        await ask(answers, user("other"))

    done = played(client)
    assert len(done.texts()) == 1
    assert "other" in done.texts()[0]


def test_server_reports_a_reply_whose_client_left(
    address: str, sessions: ScriptedSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = False

    async def answer(session: str, request: object, **options: object) -> ChatReply:
        while not left:
            await asyncio.sleep(0.005)
        time.sleep(0.2)  # the connection ends meanwhile, and the event loop learns it later than the reply
        return ChatReply("r1", (), 1, 0)

    monkeypatch.setattr(sessions, "answer", answer)
    url = httpx.URL(address)
    content = httpx.Request("POST", f"{address}/sessions/s1/v1/completions", json={"prompt": "x"}).read()
    with socket.create_connection((url.host, url.port or 0)) as connection:
        head = f"POST /sessions/s1/v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(0.1)
        left = True
        time.sleep(0.05)
    deadline = time.monotonic() + 5
    while not sessions.missed_replies and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sessions.missed_replies == [("s1", "r1")]


def test_clients_announce_their_retries(address: str, sessions: ScriptedSessions) -> None:
    for retries, expected in ((None, False), ("0", False), ("1", True)):
        header = {} if retries is None else {"x-stainless-retry-count": retries}
        httpx.post(f"{address}/sessions/s1/v1/chat/completions", json=BODY, headers=HEADERS | header).raise_for_status()
        assert sessions.retried[-1] is expected
