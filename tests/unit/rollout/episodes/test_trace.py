"""States of episodes on the timeline."""

from __future__ import annotations

from collections.abc import Callable

from mcore_rl.rollout.episodes.builtin import ToolEpisode
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.episodes.trace import MAX_TRACED
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import FakeTools, Stage
from tests.unit.rollout.episodes.scripted import asks_until_it_has_seen, echo

SetUp = Callable[..., Stage]


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

    on = stage(lambda text: f"a{made.CLOSE}", run)
    on.play(MAX_TRACED + 5)
    ended = [name for name, _, _ in on.spans if name.endswith("FAILED")]
    assert len(ended) == MAX_TRACED
    on.play(3, seed=50)
    assert len([name for name, _, _ in on.spans if name.endswith("FAILED")]) == MAX_TRACED + 3
