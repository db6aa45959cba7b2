"""Requests without a session if engines are lost, sleep, or have no weights yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from mcore_rl.config.episodes import SERVING
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.gateway import wire
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.exchange import ChatReply, RefusedError
from mcore_rl.rollout.gateway.membership import GatewayMembership
from mcore_rl.rollout.gateway.progress import ReplyStart, TextDelta
from mcore_rl.rollout.gateway.server import GatewayServer
from mcore_rl.rollout.journal import TokenJournal, read_journal
from tests.unit.rollout.episodes.conftest import SetUp, Stage
from tests.unit.rollout.episodes.scripted import END
from tests.unit.rollout.gateway.test_hub import ROOM, Site, request, with_site

SECONDS = 20
LONG = "a response of several tokens"


class Host:
    """A gateway and a client. `engine` starts an engine whose journal is `name`."""

    def __init__(self, server: GatewayServer, stage: SetUp, directory: Path) -> None:
        self._server, self._stage, self._directory = server, stage, directory
        self._client = openai.OpenAI(
            base_url=f"{server.address.url}/v1", api_key=server.address.token, max_retries=0, timeout=SECONDS
        )
        self._threads = ThreadPoolExecutor(2)

    def journal(self, name: str) -> Path:
        return self._directory / name

    def engine(self, name: str) -> tuple[Stage, GatewayMembership]:
        rollout = RolloutConfig(episode=SERVING, max_prompt_tokens=200, max_response_tokens=600)
        episode, journal = GatewayEpisode(rollout), self.journal(name)
        stage = self._stage(lambda text: f"{LONG}{END}", episode, journal=TokenJournal(journal))
        member = GatewayMembership(self._server.address, rollout, str(journal))
        member.set_episode(stage.player, episode)
        member.admit(can_generate=False)
        return stage, member

    def ask(self) -> Future[str]:
        def ask() -> str:
            messages: Any = [{"role": "user", "content": "q"}]
            done = self._client.chat.completions.create(model="any", messages=messages, temperature=1)
            return done.choices[0].message.content or ""

        return self._threads.submit(ask)


@pytest.fixture
def host(stage: SetUp, tmp_path: Path) -> Iterator[Host]:
    with GatewayServer("tiny", "127.0.0.1", 0, "127.0.0.1", serves=True) as server:
        yield Host(server, stage, tmp_path)


def until(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fail_after(stage: Stage, passes: int, error: Exception) -> None:
    """Make the engine fail after some forward passes."""
    run_step, left = stage.engine._run_step, iter(range(passes))

    def step(limit: int) -> Any:
        if next(left, None) is None:
            raise error
        return run_step(limit)

    stage.engine._run_step = step  # type: ignore[method-assign]


def partials(stage: Stage) -> list[np.ndarray | None]:
    """Return a list that receives the tokens with which each request of the engine begins."""
    add, found = stage.engine._add, list[np.ndarray | None]()

    def added(requests: Any) -> None:
        found.extend(each.request.partial and each.request.partial.token_ids for each in requests.values())
        add(requests)

    stage.engine._add = added  # type: ignore[method-assign]
    return found


def test_another_engine_continues_a_response_from_the_journal(host: Host) -> None:
    (first, member), (second, other) = host.engine("first"), host.engine("second")
    fail_after(first, 3, WorkerDiedError("rank 1 is gone"))
    begun = partials(second)
    member.update(can_generate=True)
    asked = host.ask()
    until(lambda: first.engine.submitted and not first.player._engine._serving)
    other.update(can_generate=True)
    assert asked.result(SECONDS) == LONG
    assert first.engine.submitted == second.engine.submitted, "ids and seeds"
    (sampled,) = read_journal(host.journal("first")).values()
    assert len(sampled.completion.token_ids) == 3
    assert [part is not None and part.tolist() for part in begun] == [sampled.completion.token_ids.tolist()]
    until(lambda: not read_journal(host.journal("second")))  # released after the reply


def test_requests_wait_for_weights_and_while_the_engine_sleeps(host: Host) -> None:
    stage, member = host.engine("first")
    member.update(can_generate=False)
    early = host.ask()
    time.sleep(0.2)
    assert not stage.engine.submitted
    stage.engine.go.clear()
    member.update(can_generate=True)
    until(lambda: stage.engine.submitted)
    stage.engine.go.set()
    assert early.result(SECONDS) == LONG

    stage.engine.go.clear()
    asked = host.ask()
    until(lambda: len(stage.engine.submitted) == 2)
    member.sleep()
    stage.engine.go.set()
    until(lambda: not stage.engine.num_running)
    time.sleep(0.1)
    assert not asked.done()
    member.update(can_generate=True)
    assert asked.result(SECONDS) == LONG


def test_requests_without_a_session_wait_for_an_engine(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        asked = asyncio.create_task(site.hub.serve(request("one")))
        counted = asyncio.create_task(site.hub.count(None, request("two")))
        left = asyncio.create_task(site.hub.serve(request("left")))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        engine = await site.engine()
        kind, key, _, sent = await engine.next()
        assert (kind, sent) == (wire.SERVE, request("one"))
        kind, other_key, _, sent = await engine.next()
        assert (kind, sent) == (wire.COUNT, request("two"))
        engine.send(wire.REPLY, other_key, ChatReply("", (), 7, 0))
        engine.reply(key, "r")
        assert ((await asked).id, await counted) == ("r", 7)
        assert not site.hub._waiting

    with_site(test, tmp_path)


def test_requests_of_a_lost_engine_continue_from_its_journal(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        asked = asyncio.create_task(site.hub.serve(request("one")))
        calls = list[wire.ServedCall]()
        for journal in ("asleep", "j0", "j1"):
            engine = await site.engine()
            engine.send(wire.JOURNAL, journal)
            kind, key, call, sent = await engine.next()
            assert (kind, sent) == (wire.SERVE, request("one"))
            calls.append(call)
            await asyncio.sleep(0.05)
            if journal == "j0":  # a count has nothing to continue
                counted = asyncio.create_task(site.hub.count(None, request("two")))
                await engine.next()
            if journal == "asleep":
                engine.send(wire.LEAVE)
            if journal != "j1":
                await engine.lose()
        kind, other_key, *_ = await engine.next()
        assert kind == wire.COUNT
        engine.send(wire.REPLY, other_key, ChatReply("", (), 7, 0))
        engine.reply(key, "r")
        assert ((await asked).id, await counted) == ("r", 7)
        assert [call.journals for call in calls] == [(), (), ("j0",)], "an engine that sleeps has aborted its requests"
        assert len({(call.name, call.seed) for call in calls}) == 1

    with_site(test, tmp_path)


def test_request_that_two_engines_died_with_is_refused(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        asked = asyncio.create_task(site.hub.serve(request("one")))
        for _ in range(2):
            engine = await site.engine()
            await engine.next()
            await engine.lose()
        with pytest.raises(RefusedError, match="2 engines died with this request") as caught:
            await asked
        assert caught.value.status == 503

    with_site(test, tmp_path)


def test_request_whose_stream_was_refused_is_not_sampled_again(tmp_path: Path) -> None:
    """The next engine samples another text, and dies before it acknowledges the end of the request."""

    async def test(site: Site) -> None:
        asked = asyncio.create_task(site.hub.serve(replace(request("one"), stream=True)))
        for text in ("abc", "xyz"):
            engine = await site.engine()
            _, key, *_ = await engine.next()
            engine.send(wire.PROGRESS, [(key, ReplyStart("r", 1, 0), [TextDelta(0, "text", 0, text)])])
            await asyncio.sleep(0.05)
            if text == "abc":
                await engine.lose()
        with pytest.raises(RefusedError, match="samples another reply"):
            await asked
        engine.send(wire.LEAVE)
        await engine.lose()
        assert not site.hub._waiting

    with_site(test, tmp_path)


def test_requests_beyond_the_room_of_engines_wait(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        asked = [asyncio.create_task(site.hub.serve(request(str(n)))) for n in range(2 * ROOM + 2)]
        counted = asyncio.create_task(site.hub.count(None, request("count")))
        await asyncio.sleep(0)
        first = await site.engine()
        keys = [(await first.next())[1] for _ in range(ROOM)]
        kind, key, *_ = await first.next()
        assert kind == wire.COUNT, "a count needs no room"
        first.send(wire.REPLY, key, ChatReply("", (), 7, 0))
        assert await counted == 7
        second = await site.engine()
        assert [(await second.next())[3] for _ in range(ROOM)] == [request(str(ROOM + n)) for n in range(ROOM)]
        assert len(site.hub._waiting) == 2
        await second.lose()  # its requests are the next
        first.reply(keys[0], "r")
        assert (await first.next())[3] == request(str(ROOM))
        for task in asked:
            task.cancel()

    with_site(test, tmp_path)
