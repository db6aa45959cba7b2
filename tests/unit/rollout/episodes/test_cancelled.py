"""Episodes that raise exceptions with which asyncio ends tasks or its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import Stage

END = made.CLOSE
SetUp = Callable[..., Stage]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()])
def test_player_self_cancelling_episode_fails_alone(stage: SetUp, error: BaseException) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> float:
        await session.generate(prompt.token_ids)
        if session.id.endswith(".1"):
            raise error
        return 1.0

    good, bad, also_good = stage(lambda text: f"hello{END}", run).play(3)
    assert (good.reward, also_good.reward) == (1.0, 1.0)
    assert f"it raised {type(error).__name__}" in str(bad.error)
