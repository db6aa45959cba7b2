"""Connection of an engine to the gateway: an error ends one session or one request, and never other sessions."""

from __future__ import annotations

import asyncio
import pickle
import struct
from pathlib import Path
from typing import cast

import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.gateway import wire
from mcore_rl.rollout.gateway.answers import Answers
from mcore_rl.rollout.gateway.exchange import ChatReply, ChatRequest, HarnessEnd, RefusedError, Reward
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.rollout.gateway.sessions import AskedRequest
from mcore_rl.rollout.gateway.wire import GatewayAddress, ServedCall
from tests.unit.rollout.episodes.conftest import QUESTION, SetUp
from tests.unit.rollout.episodes.scripted import END
from tests.unit.rollout.gateway.test_hub import ROW, TOKEN, Site, request, serving, with_site


class Scripted:
    """Answers of a session: every request has the reply `reply`."""

    def __init__(self, reply: str = "r1") -> None:
        self.reply = reply
        self.taken: list[Reward] = []
        self.marks: list[tuple[str, bool]] = []
        self.sampling: asyncio.Event | None = None
        """Event for which `answer` waits."""
        self.num_ended = 0
        """Number of requests that have waited."""
        self.counting: asyncio.Event | None = None
        """Event for which `count` waits."""
        self.fails: Exception | None = None

    async def answer(self, asked: object, progress: object = None) -> ChatReply:
        if self.sampling is not None:
            try:
                await self.sampling.wait()
            finally:
                self.num_ended += 1
        if self.fails is not None:
            raise self.fails
        return ChatReply(self.reply, (), 1, 0)

    async def count(self, asked: object) -> int:
        if self.counting is None:
            raise OSError("truncated file")
        await self.counting.wait()
        return 7

    def reward(self, reward: Reward) -> None:
        if reward.call not in (None, self.reply):
            raise KeyError(reward.call)
        self.taken.append(reward)

    def mark(self, reply: str, *, is_seen: bool) -> None:
        self.marks.append((reply, is_seen))


class Served:
    """Answers of requests without a session, by `answer`."""

    def __init__(self, answer: Scripted | None = None) -> None:
        self.answer = answer or Scripted()
        self.calls: list[ServedCall] = []
        self.ended: list[ServedCall] = []
        self.errors: list[Exception] = []
        """Errors that ended the connection."""
        self.unreadable: Exception | None = None
        """Error of `answers`."""

    async def answers(self, call: ServedCall) -> Answers:
        self.calls.append(call)
        if self.unreadable is not None:
            raise self.unreadable
        return cast(Answers, self.answer)

    def end(self, call: ServedCall) -> None:
        self.ended.append(call)

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


async def linked(site: Site, served: Served | None = None) -> GatewayLink:
    return await GatewayLink.connect(GatewayAddress(str(site.path), TOKEN, "", ""), served or Served())


def playing(link: GatewayLink, name: str, answers: Scripted | Answers) -> asyncio.Task[HarnessEnd]:
    """Serve a session until its end."""

    async def play() -> HarnessEnd:
        async with link.session(name, ROW, cast(Answers, answers)) as ended:
            return await ended

    return asyncio.create_task(play())


async def answered(site: Site) -> None:
    """Open session "a" on an engine, get the reply "r1" for "one", and lose the engine."""
    engine = await site.engine()
    engine.send(wire.OPEN, "a", ROW)
    await site.taken()
    asked = site.ask("a", "one")
    engine.reply((await engine.next())[1], "r1")
    await asked
    await site.hub.reward("a", Reward(1.0, "r1"))
    await engine.lose()


def test_another_reply_after_a_loss_ends_its_session_only(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        await answered(site)
        link = await linked(site)
        other, answers = playing(link, "b", Scripted()), Scripted("r2")
        end = await playing(link, "a", answers)
        assert end.error is not None
        assert "journal" in end.error
        assert not answers.taken, "the reward names a reply that this engine does not have"
        await site.hub.end("b", HarnessEnd())
        assert (await other).error is None

    with_site(test, tmp_path)


def test_an_ended_session_is_replayed_with_its_rewards(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        await answered(site)
        await site.hub.end("a", HarnessEnd({"exit": 3}))
        answers = Scripted()
        assert await playing(await linked(site), "a", answers) == HarnessEnd({"exit": 3})
        assert answers.taken == [Reward(1.0, "r1")]

    with_site(test, tmp_path)


def test_an_error_of_a_reward_ends_its_session_only(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        link, answers = await linked(site), Scripted()
        first, other = playing(link, "a", answers), playing(link, "b", Scripted())
        await site.taken()
        await site.ask("a", "one")
        answers.reply = "changed"
        await site.hub.reward("a", Reward(1.0, "r1"))
        with pytest.raises(KeyError):
            await first
        await site.hub.end("b", HarnessEnd())
        assert (await other).error is None

    with_site(test, tmp_path)


def test_requests_of_an_engine_that_dies_wait_for_another(tmp_path: Path) -> None:
    """A rank of the engine dies; the process, with the connection, still lives."""

    async def test(site: Site) -> None:
        dying, served = Scripted(), Served()
        dying.sampling, dying.fails, served.answer = asyncio.Event(), WorkerDiedError("rank 1 is gone"), dying
        link = await linked(site, served)
        played = playing(link, "a", dying)
        await site.taken()
        both = site.ask("a", "one"), asyncio.create_task(site.hub.serve(request("two")))
        while len(link._session_of) < 2:
            await asyncio.sleep(0)
        dying.sampling.set()
        with pytest.raises(WorkerDiedError, match="rank 1"):
            await played
        other = await linked(site)
        again = playing(other, "a", Scripted())
        assert [(await each).id for each in both] == ["r1", "r1"]
        await site.hub.end("a", HarnessEnd())
        assert (await again).error is None
        assert served.ended == served.calls

    with_site(test, tmp_path)


def test_an_error_of_a_count_refuses_its_request_only(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        both = playing(link := await linked(site), "a", Scripted()), playing(link, "b", Scripted())
        await site.taken()
        with pytest.raises(RefusedError, match=r"cannot be counted.*truncated file") as caught:
            await site.hub.count("a", request("one"))
        assert caught.value.status == 500
        for name in "ab":
            assert (await site.ask(name, "one")).id == "r1"
            await site.hub.end(name, HarnessEnd())
        assert [(await each).error for each in both] == [None, None]

    with_site(test, tmp_path)


def test_requests_are_answered_while_tokens_are_counted(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        link, answers = await linked(site), Scripted()
        answers.counting = asyncio.Event()
        playing(link, "a", answers)
        await site.taken()
        left, counted = (asyncio.create_task(site.hub.count("a", request("one"))) for _ in range(2))
        await asyncio.sleep(0)
        left.cancel()
        assert (await site.ask("a", "one")).id == "r1"
        assert len(link._counts) == 1, "the other client has left"
        answers.counting.set()
        assert await counted == 7
        await link.close()

    with_site(test, tmp_path)


def test_a_reply_whose_client_leaves_on_its_way_is_missed(tmp_path: Path) -> None:
    """The program ends at once, before the gateway has received the reply."""

    async def test(site: Site) -> None:
        link, answers = await linked(site), Scripted()
        answers.sampling = asyncio.Event()
        played = playing(link, "a", answers)
        await site.taken()
        left, refused = site.ask("a", "one"), site.ask("a", "two")
        while len(link._session_of) < 2:
            await asyncio.sleep(0)
        replied, site.hub._replied = site.hub._replied, lambda *_: None  # type: ignore[method-assign]
        answers.sampling.set()
        while answers.num_ended < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.sleep(0)
        await site.hub.end("a", HarnessEnd())
        await played
        assert answers.marks == [("r1", False)] * 3, "once for the client that left, and for both at the end"
        with pytest.raises(RefusedError):
            await refused
        site.hub._replied = replied  # type: ignore[method-assign]
        assert not link._session_of

    with_site(test, tmp_path)


def test_a_request_that_is_aborted_at_once_gets_its_reply(tmp_path: Path) -> None:
    """It counts as a request, so that another engine that plays the session again gives later ones the same seeds."""

    async def test(site: Site) -> None:
        link, answers = await linked(site), Scripted()
        answers.sampling = asyncio.Event()
        played = playing(link, "a", answers)
        await site.taken()
        left = site.ask("a", "one")
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        (session,) = site.hub._sessions.values()
        (asked,) = (each for each in session.history if isinstance(each, AskedRequest))
        await asked.replied.wait()
        assert answers.num_ended == 1
        assert not link._session_of
        await site.hub.end("a", HarnessEnd())
        await played

    with_site(test, tmp_path)


@pytest.mark.parametrize("numbers", [(2, 1), (1, 2), (3, 2)])
def test_choices_are_counted_in_the_order_of_requests(stage: SetUp, tmp_path: Path, numbers: tuple[int, int]) -> None:
    """The oracle is the same requests one after another, as they are sent when a session is played again."""

    def ids(*, together: bool) -> list[str]:
        found: list[str] = []

        async def episode(session: Session, prompt: EpisodePrompt) -> float:
            async with serving(tmp_path / f"{together}") as site:
                link, answers = await linked(site), Answers(session, session.context.offering, False, True)
                played = playing(link, "a", answers)
                await site.taken()
                calls = [site.hub.answer("a", ChatRequest(QUESTION, num_choices=number)) for number in numbers]
                replies = await asyncio.gather(*calls) if together else [await call for call in calls]
                found.extend(each.id for each in replies)
                await site.hub.end("a", HarnessEnd())
                await played
                await link.close()
                return 1.0

        (outcome,) = stage(lambda text: f"reply{END}", episode).play()
        assert outcome.error is None, outcome.traceback
        return found

    assert ids(together=True) == ids(together=False)


def test_the_end_of_a_session_waits_for_aborted_requests(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        link, answers = await linked(site), Scripted()
        answers.sampling = asyncio.Event()
        played = playing(link, "a", answers)
        await site.taken()
        site.ask("a", "one")
        while not link._session_of:
            await asyncio.sleep(0)
        await site.hub.end("a", HarnessEnd())
        await played
        assert answers.num_ended == 1
        assert not link._session_of

    with_site(test, tmp_path)


def test_an_error_of_a_served_request_refuses_it_only(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        served = Served()
        link = await linked(site, served)
        served.unreadable = OSError("truncated journal")
        with pytest.raises(RefusedError, match="truncated journal") as caught:
            await site.hub.serve(request("one"))
        assert caught.value.status == 500
        served.unreadable = None
        assert (await site.hub.serve(request("two"))).id == "r1"
        assert served.errors == []
        await link.close()

    with_site(test, tmp_path)


def test_an_error_of_the_connection_is_passed_on(tmp_path: Path) -> None:
    """The engine would stay idle: it connects once."""

    async def test(site: Site) -> None:
        served = Served()
        link = await linked(site, served)
        while not site.hub._engines:
            await asyncio.sleep(0)
        (engine,) = site.hub._engines
        engine._writer.write(struct.pack("!Q", 3) + b"bad")
        with pytest.raises(pickle.UnpicklingError):
            await link._task
        (error,) = served.errors
        assert isinstance(error, pickle.UnpicklingError)

    with_site(test, tmp_path)
