"""Return values of episodes, histories that are rendered again as new sequences, and branches from one prompt."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from mcore_rl.rollout.episodes.builtin import ToolEpisode
from mcore_rl.rollout.episodes.outcome import EpisodeResult
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import FakeTools, SetUp
from tests.unit.rollout.episodes.scripted import asks_until_it_has_seen, call, echo, once

END = made.CLOSE


def test_session_generate_repeated_prompt_gives_a_new_response(stage: SetUp) -> None:
    async def best_of(session: Session, prompt: EpisodePrompt) -> EpisodeResult:
        tries = [await session.generate(prompt.token_ids) for _ in range(3)]
        return EpisodeResult(reward=1.0, sampled=[tries[1]])

    on = stage(lambda text: f"a{END}", best_of)
    (outcome,) = on.play()
    assert len(set(on.engine.submitted.values())) == 3
    assert len(outcome.trajectories) == 1
    (outcome,) = stage(lambda text: f"a{END}", _three_tries).play()
    assert len(outcome.trajectories) == 3


async def _three_tries(session: Session, prompt: EpisodePrompt) -> float:
    await asyncio.gather(*(session.generate(prompt.token_ids) for _ in range(3)))
    return 0.5


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (float("nan"), "returned reward 'nan' instead of a finite number"),
        ("good", "returned reward 'good' instead of a finite number"),
        ({"acc": 1.0}, r"returned a dict without score \(acc\)"),
        (EpisodeResult(token_ids=[1, 2, 3]), "returned 3 tokens that differ from the sampled ones"),
        (EpisodeResult(sampled=[]), "EpisodeResult.sampled is empty"),
    ],
)
def test_outcome_invalid_return_value_is_an_error(stage: SetUp, returned: Any, message: str) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> Any:
        await session.generate(prompt.token_ids)
        return returned

    (outcome,) = stage(lambda text: f"a{END}", run).play()
    assert re.search(message, str(outcome.error))


def test_outcome_mask_may_only_exclude_sampled_tokens(stage: SetUp) -> None:
    def returning(change: Callable[[list[int]], list[int]]) -> Callable[..., Any]:
        async def run(session: Session, prompt: EpisodePrompt) -> EpisodeResult:
            first = await session.generate(prompt.token_ids)
            ids = prompt.token_ids + first.token_ids + session.encode("xx")
            second = await session.generate(ids)
            mask = [0] * len(prompt.token_ids) + [1] * len(first.token_ids) + [0, 0] + [1] * len(second.token_ids)
            return EpisodeResult(reward=1.0, token_ids=ids + second.token_ids, mask=change(mask))

        return run

    on = stage(lambda text: f"a{END}", returning(lambda mask: [*mask[:-2], 0, 0]))
    (outcome,) = on.play()
    assert on.trained_text(outcome) == f"a{END}"
    (outcome,) = stage(lambda text: f"a{END}", returning(lambda mask: [1] * len(mask))).play()
    assert "trains tokens that were not sampled" in str(outcome.error)
    (outcome,) = stage(lambda text: f"a{END}", returning(lambda mask: mask[1:])).play()
    assert "a mask of" in str(outcome.error)


def test_next_prompt_new_sequence_equals_deployment(stage: SetUp) -> None:
    """The template omits earlier reasoning: keep retains it, new_sequence drops it, and each turn is trained where it
    was sampled."""

    say = once(f"<think>hm</think>{call('a')}")
    kept = stage(say, ToolEpisode(), tools=FakeTools(echo), template=made.FORGETS_REASONING)
    (outcome,) = kept.play()
    assert len(outcome.trajectories) == 1
    assert "<think>hm</think>" in kept.text(outcome)
    anew = stage(say, ToolEpisode(), tools=FakeTools(echo), template=made.FORGETS_REASONING, history="new_sequence")
    (outcome,) = anew.play()
    assert [anew.trained_text(outcome, i) for i in range(2)] == [f"<think>hm</think>{call('a')}{END}", f"done{END}"]
    assert "<think>" not in anew.text(outcome, 1)
    rendered = anew.player.context.conversation.render(list(outcome.messages), prompts=False)
    assert anew.text(outcome, 1) + "\n" == rendered


def test_next_prompt_long_history_ends_or_drops_turns(stage: SetUp) -> None:
    sizes = {"max_prompt_tokens": 100, "max_response_tokens": 300, "max_turn_tokens": 90, "max_turns": 6}
    ends = stage(asks_until_it_has_seen(100), ToolEpisode(), tools=FakeTools(echo), **sizes)
    (outcome,) = ends.play()
    assert (outcome.finish_reason, len(outcome.trajectories)) == ("length", 1)
    drops = stage(asks_until_it_has_seen(100), ToolEpisode(), tools=FakeTools(echo), long_history="drop_turns", **sizes)
    (outcome,) = drops.play()
    assert outcome.finish_reason == "turns"
    assert len(outcome.trajectories) > 1
    for which, trajectory in enumerate(outcome.trajectories):
        assert drops.text(outcome, which).startswith(drops.prompt.text)
        assert len(trajectory.prompt_ids) + len(trajectory.token_ids) <= 400
