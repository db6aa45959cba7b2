"""Episodes as coroutines: sampled tokens are trained, limits end episodes, and failures affect one episode only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.episodes.builtin import ToolEpisode
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.episodes.single_turn import Attempt, AttemptBatch, SingleTurnPlayer
from mcore_rl.rollout.episodes.trace import MAX_TRACED
from mcore_rl.rollout.journal import JournaledResponse, TokenJournal, read_journal
from mcore_rl.rollout.tools.interface import ToolResult
from mcore_rl.types import NOT_SAMPLED, Completion, Delta, SamplingOptions
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import FakeTools, SetUp, Stage
from tests.unit.rollout.episodes.scripted import asks_until_it_has_seen, call, echo

END = made.CLOSE


async def one_turn(session: Session, prompt: EpisodePrompt) -> None:
    await session.generate(prompt.token_ids)


def test_a_report_has_the_tokens_of_a_lost_engine_and_the_new_ones(stage: SetUp) -> None:
    found, whole = list[tuple[int, list[int]]](), list[int]()

    async def episode(session: Session, prompt: EpisodePrompt) -> float:
        def report(position: int, delta: Delta) -> None:
            found.append((position, delta.token_ids))

        sampled = await session.generate(prompt.token_ids, report_of=lambda request: report)
        whole[:] = sampled.token_ids
        async with asyncio.timeout(20):
            while sum(len(ids) for _, ids in found) < len(whole):  # reports may follow the completion
                await asyncio.sleep(0.01)
        return 1.0

    set_up = stage(lambda text: f"hello{END}", episode)
    ids = np.array(set_up.tokenizer("he", add_special_tokens=False)["input_ids"], np.int32)
    partial = Completion("train.0.0", ids, -ids.astype(np.float32), "abort", np.zeros(len(ids), np.int32))
    set_up.play(drawn={"train.0.0": JournaledResponse(5, partial, None)})
    assert found[0] == (0, ids.tolist())
    assert [token for _, part in found for token in part] == whole
    assert all(whole[position : position + len(part)] == part for position, part in found)


def one_turn_with(sampling: Any) -> Callable[..., Any]:
    async def run(session: Session, prompt: EpisodePrompt) -> float:
        await session.generate(prompt.token_ids, sampling)
        return 1.0

    return run


async def two_turns(session: Session, prompt: EpisodePrompt) -> None:
    first = await session.generate(prompt.token_ids)
    await asyncio.sleep(0.01 * (session.seed % 3))  # episodes overtake each other
    await session.generate(prompt.token_ids + first.token_ids + session.encode("on"))


@pytest.mark.parametrize(
    ("reason", "key", "value"), [("turns", "max_turns", 2), ("length", "max_response_tokens", 250)]
)
def test_player_limit_becomes_the_finish_reason(stage: SetUp, reason: str, key: str, value: int) -> None:
    on = stage(asks_until_it_has_seen(100), ToolEpisode(), tools=FakeTools(echo), **{key: value})
    (outcome,) = on.play()
    assert outcome.finish_reason == reason
    assert outcome.error is None
    (trajectory,) = outcome.trajectories
    assert len(trajectory.token_ids) <= on.tokens
    assert trajectory.versions[-1] != NOT_SAMPLED
    assert trajectory.trained[-1] == 1


def test_player_time_limit_ends_the_episode(stage: SetUp) -> None:
    tools = FakeTools(lambda arguments: 30.0)
    on = stage(asks_until_it_has_seen(1), ToolEpisode(), tools=tools, max_episode_seconds=0.3)
    (outcome,) = on.play()
    assert (outcome.finish_reason, outcome.error) == ("seconds", None)
    assert on.trained_text(outcome) == f"now {call('0')}{END}"
    assert tools.closed == ["train.0.0"]


def test_player_time_limit_aborts_the_generation(stage: SetUp) -> None:
    on = stage(lambda text: "x" * 400 + END, one_turn, max_episode_seconds=0.2)
    on.engine.go.clear()
    timer = asyncio.run_coroutine_threadsafe(_later(0.4, on.engine.go.set), on.player._loop)
    (outcome,) = on.play()
    timer.result(10)
    assert "before anything was sampled" in str(outcome.error)
    assert on.player._engine.between_steps(lambda: on.engine.num_running) == 0
    assert len(on.engine.cancelled) == 1


async def _later(seconds: float, what: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    what()


@pytest.mark.parametrize("error", [KeyError("lost"), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()])
def test_player_failing_episode_affects_no_other(stage: SetUp, error: BaseException) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> float:
        await session.generate(prompt.token_ids)
        session.reward(3.0)
        if session.id.endswith(".1"):
            raise error
        return 1.0

    on = stage(lambda text: f"hello{END}", run)
    good, bad, also_good = on.play(3)
    assert (good.error, good.reward, also_good.reward) == (None, 1.0, 1.0)
    assert str(bad.error).startswith(f"the episode failed: it raised {type(error).__name__}")
    assert "test_player.py" in str(bad.traceback)
    assert bad.trajectories[0].trained is not None
    assert not bad.trajectories[0].trained.any()
    assert bad.turn_rewards == 0
    assert on.trained_text(good) == f"hello{END}"


def test_player_empty_episode_has_one_untrained_token(stage: SetUp) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> None:
        return None

    on = stage(lambda text: END, run)
    on.engine.version = 4
    (outcome,) = on.play()
    assert "ended without calling session.generate" in str(outcome.error)
    (trajectory,) = outcome.trajectories
    assert trajectory.prompt_ids.tolist() == on.prompt.token_ids.tolist()
    assert (len(trajectory.token_ids), trajectory.trained.tolist(), trajectory.versions.tolist()) == (1, [0], [4])


def test_player_engine_failure_is_raised(stage: SetUp) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> float:
        try:
            await session.generate(prompt.token_ids)
        except Exception:  # result forms that a user's episode may return
            return 0.0
        return 1.0

    on = stage(lambda text: f"hello{END}", run)
    on.engine.fails = WorkerDiedError("rank 1 of the engine died")
    with pytest.raises(WorkerDiedError, match="rank 1"):
        on.play(3)


def test_player_invalid_token_fails_the_episode_only(stage: SetUp) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> None:
        await session.generate([10_000])

    (outcome,) = stage(lambda text: END, run).play()
    assert "a token id is outside the model's" in str(outcome.error)


def test_session_seeds_depend_on_the_history_only(stage: SetUp) -> None:
    seeds = []
    for _ in range(2):
        on = stage(lambda text: f"a{END}", two_turns)
        on.play(4)
        seeds.append(sorted(on.engine.submitted.values()))
        assert set(seeds[-1]) >= {5, 6, 7, 8}, "a first turn has the seed of a single turn"
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 8


def test_player_partial_tokens_apply_to_each_turn(stage: SetUp) -> None:
    on = stage(asks_until_it_has_seen(2), ToolEpisode(), tools=FakeTools(echo))
    (expected,) = on.play()
    limited = [replace(each, request=replace(each.request, tokens_per_version=2)) for each in on.attempts()]
    (outcome,) = on.play(attempts=limited)
    np.testing.assert_array_equal(outcome.trajectories[0].token_ids, expected.trajectories[0].token_ids)
    parked = {engine_id.partition("~")[2] for engine_id in on.engine.cancelled}
    assert len(parked) == 3, "each of the three turns was parked"


def test_player_continues_turns_of_lost_engines(stage: SetUp, tmp_path: Path) -> None:
    """If this engine is lost as well, the next one finds all tokens in its journal."""
    say = asks_until_it_has_seen(2)
    on = stage(say, ToolEpisode(), tools=FakeTools(echo), journal=TokenJournal(tmp_path / "lost"))
    (whole,) = on.play()
    drawn = dict(list(read_journal(tmp_path / "lost").items())[:2])
    again = stage(say, ToolEpisode(), tools=FakeTools(echo), journal=TokenJournal(tmp_path / "again"))
    (resumed,) = again.play(drawn=drawn)
    assert again.text(resumed) == on.text(whole)
    assert resumed.taken_over == sum(len(d.completion.token_ids) for d in drawn.values())
    assert len(again.engine.submitted) == 1, "two of three turns had been drawn"
    kept = read_journal(tmp_path / "again")
    assert {*kept} == {*drawn, *again.engine.submitted}
    for name, found in drawn.items():
        assert (kept[name].seed, kept[name].finish_reason) == (found.seed, "stop")
        assert kept[name].completion.token_ids.tolist() == found.completion.token_ids.tolist()
    other = stage(say, ToolEpisode(), tools=FakeTools(lambda arguments: ToolResult("something else")))
    other.play(drawn=drawn)
    assert len(other.engine.submitted) == 2, "after another answer nothing fits but the first turn"


def test_player_experts_cover_the_whole_sequence(stage: SetUp) -> None:
    on = stage(asks_until_it_has_seen(1), ToolEpisode(), tools=FakeTools(echo), experts=True)
    (outcome,) = on.play()
    (trajectory,) = outcome.trajectories
    experts = trajectory.routed_experts
    assert experts is not None
    assert len(experts) == len(trajectory.prompt_ids) + len(trajectory.token_ids) - 1
    assert experts[:, 0, 1].tolist() == list(range(len(experts)))
    first_turn = len(trajectory.prompt_ids) + len(f"now {call('0')}") - 1 - len("<tool_call></tool_call>") + 2
    assert experts[: first_turn - 1, 0, 0].tolist() == [0] * (first_turn - 1)
    assert experts[first_turn + 1 :, 0, 0].tolist() == [1] * (len(experts) - first_turn - 1)


def test_player_single_turn_episode_equals_single_turn_player(stage: SetUp) -> None:
    on = stage(lambda text: f"hello{END}", one_turn)
    through = on.play(2)
    simple: dict[int, Any] = {}
    batch = AttemptBatch(on.attempts(2), lambda: None, simple.__setitem__)
    SingleTurnPlayer(on.player._engine, on.tokenizer).play(batch)
    for place, outcome in enumerate(through):
        (a,), (b,) = outcome.trajectories, simple[place].trajectories
        for name in ("prompt_ids", "token_ids", "logp", "versions"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert (outcome.text, outcome.finish_reason) == (simple[place].text, simple[place].finish_reason)
        assert replace(outcome, trajectories=()).reward is None


def test_player_withdraw_takes_unstarted_attempts_only(stage: SetUp) -> None:
    """Two episodes have slots, and the engine runs one request at a time: the second episode has not started while the
    first one is in its first turn."""
    tools = FakeTools(echo)
    on = stage(asks_until_it_has_seen(1), ToolEpisode(), tools=tools, max_concurrent_episodes=2)
    outcomes: dict[int, Any] = {}
    begun: list[None] = []
    seen: list[list[str]] = []

    def choose(unbegun: Collection[str]) -> list[str]:
        seen.append(sorted(unbegun))
        return [name for name in unbegun if not name.endswith(".0")]

    batch = AttemptBatch(on.attempts(5), lambda: begun.append(None), outcomes.__setitem__)
    on.engine.slots = 1
    on.engine.go.clear()
    loop = on.player._engine
    with ThreadPoolExecutor(2) as pool:
        playing = pool.submit(on.player.play, batch)
        deadline = time.monotonic() + 30
        assert on.engine.passing.wait(30)
        while on.engine.num_running + loop._calls.qsize() < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        withdrawing = pool.submit(on.player.withdraw, choose)
        while loop._calls.empty() and not withdrawing.done() and time.monotonic() < deadline:
            time.sleep(0.005)
        on.engine.go.set()
        withdrawing.result(30)
        playing.result(30)
    assert seen == [[f"train.0.{place}" for place in (1, 2, 3, 4)]]
    assert outcomes.pop(0).turns == 2
    assert outcomes == dict.fromkeys(range(1, 5))
    assert len(begun) == 1
    assert sorted(tools.closed) == ["train.0.0", "train.0.1"]


def test_player_respects_max_concurrent_episodes(stage: SetUp) -> None:
    """Episodes finish before others start, since tools and environments use memory."""
    under_way: list[int] = []
    running = 0

    async def run(session: Session, prompt: EpisodePrompt) -> None:
        nonlocal running
        running += 1
        under_way.append(running)
        await two_turns(session, prompt)
        running -= 1

    on = stage(lambda text: f"a{END}", run, max_concurrent_episodes=3)
    assert [outcome.turns for outcome in on.play(10)] == [2] * 10
    assert max(under_way) == 3


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.9}, "sampling.top_p is 0.9, which samples from fewer tokens"),
        ({"top_k": 5}, "sampling.top_k is 5, which samples from fewer tokens"),
        ({"temperature": 0}, "sampling.temperature is 0, which is greedy"),
        ({"temperature": 1e-3}, "sampling.temperature is 0.001, which is below 0.01"),
        ({"temperature": "hot"}, "sampling.temperature is 'hot', not a number"),
        ({"max_response_tokens": 0}, "sampling.max_response_tokens is 0, but must be at least 1"),
        ({"logit_bias": {}}, "sampling.logit_bias changes the sampling distribution"),
        ({"temprature": 1}, "sampling has 'temprature'; did you mean temperature?"),
        (SamplingOptions(9, top_p=0.5), "sampling.top_p is 0.5, which samples from fewer tokens"),
    ],
)
def test_session_generate_untrainable_options_fail(stage: SetUp, sampling: Any, message: str) -> None:
    (outcome,) = stage(lambda text: f"hello{END}", one_turn_with(sampling)).play()
    assert outcome.error is not None
    assert outcome.error.startswith(f"the episode failed: session.generate: {message}")


def test_session_generate_validation_may_truncate(stage: SetUp) -> None:
    on = stage(lambda text: f"hello{END}", one_turn_with({"top_p": 0.9, "top_k": 5, "temperature": 0.7}))
    (attempt,) = on.attempts()
    greedy = replace(attempt.request, sampling=replace(attempt.request.sampling, temperature=0.0))
    (outcome,) = on.play(attempts=[Attempt(greedy, attempt.prompt, trained=False)])
    assert outcome.error is None
    assert set(outcome.trajectories[0].temperatures.tolist()) == {0.0}


def test_player_episode_that_sampled_nothing_has_empty_sets(stage: SetUp) -> None:
    """A group's other responses have sets, and buffers have them for all responses or for none."""

    async def run(session: Session, prompt: EpisodePrompt) -> float:
        raise KeyError("before the first turn")

    on = stage(lambda text: f"hello{END}", run)
    (attempt,) = on.attempts()
    for keeps in (True, False):
        request = replace(attempt.request, sampling=replace(attempt.request.sampling, keep_mask=keeps))
        (outcome,) = on.play(attempts=[replace(attempt, request=request)])
        (trajectory,) = outcome.trajectories
        assert (trajectory.kept is not None) == keeps
        assert trajectory.kept is None or trajectory.kept.sizes().tolist() == [0]


def test_session_generate_temperature_per_turn(stage: SetUp) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> float:
        first = await session.generate(prompt.token_ids, {"temperature": 0.5})
        second = await session.generate([*prompt.token_ids, *first.token_ids, *session.encode("?")])
        return float(len(second.token_ids))

    (outcome,) = stage(lambda text: f"hi{END}", run).play()
    (trajectory,) = outcome.trajectories
    sampled = trajectory.trained > 0
    half = int(outcome.reward or 0)
    assert trajectory.temperatures[sampled].tolist() == [0.5] * half + [1.0] * half
    assert np.isnan(trajectory.temperatures[~sampled]).all()


def with_stop(on: Stage, *stops: str) -> Attempt:
    (attempt,) = on.attempts()
    return replace(attempt, request=replace(attempt.request, sampling=replace(attempt.request.sampling, stop=stops)))


def test_session_generate_stop_string_ends_the_turn(stage: SetUp) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> dict[str, Any]:
        first = await session.generate(prompt.token_ids)
        second = await session.generate(session.next_prompt([{"role": "user", "content": "?"}]), {"stop": "two"})
        third = await session.generate(session.next_prompt([{"role": "user", "content": "?"}]), {"stop": []})
        return {"score": 1.0, "texts": str([(each.text, each.finish_reason) for each in (first, second, third)])}

    on = stage(lambda text: f"one two three{END}", run)
    (outcome,) = on.play(attempts=[with_stop(on, "ee", "tw")])
    assert outcome.error is None
    assert outcome.parts["texts"] == str([("one ", "stop"), ("one ", "stop"), ("one two three", "stop")])
    assert outcome.text == "one \none \none two three"
    assert on.trained_text(outcome) == f"one twone twoone two three{END}"
    assert len(on.engine.cancelled) == 2, "the engine does not end them by itself"


@pytest.mark.parametrize(("stop", "text", "reason"), [("never", "one two", "length"), ("wo", "one t", "stop")])
def test_session_generate_stop_string_at_the_last_token(stage: SetUp, stop: str, text: str, reason: str) -> None:
    on = stage(lambda so_far: f"one two three{END}", one_turn_with({"max_response_tokens": len("one two")}))
    (outcome,) = on.play(attempts=[with_stop(on, stop)])
    assert (outcome.text, outcome.finish_reason) == (text, reason)
    assert len(outcome.trajectories[0].token_ids) == len("one two")


def test_trace_states_have_no_gaps(stage: SetUp) -> None:
    on = stage(asks_until_it_has_seen(1), ToolEpisode(), tools=FakeTools(echo))
    on.play()
    names = [name for name, _, _ in on.spans]
    states = ["PENDING", "RUNNING", "TOOL_CALLING", "RUNNING", "COMPLETED"]
    assert names == [f"train.0.0 {state}" for state in states]
    for (_, start, end), (_, after, _) in zip(on.spans, on.spans[1:], strict=False):
        assert start <= end == after


def test_trace_failed_state_and_limit_of_traces(stage: SetUp) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> None:
        await session.generate(prompt.token_ids)
        raise LookupError("x")

    on = stage(lambda text: f"a{END}", run)
    on.play(MAX_TRACED + 5)
    ended = [name for name, _, _ in on.spans if name.endswith("FAILED")]
    assert len(ended) == MAX_TRACED
    on.play(3, seed=50)
    assert len([name for name, _, _ in on.spans if name.endswith("FAILED")]) == MAX_TRACED + 3
