"""Episodes of rows with images: every sequence begins with the row's prompt and has its images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mcore_rl.types import PromptImages
from tests.unit.rollout.episodes.conftest import SetUp

IMAGES = PromptImages.of(np.zeros((4, 6), np.float32), np.array([[1, 2, 2]], np.int32), np.array([0], np.int32))


async def two_turns(session: Any, row: Any) -> float:
    sampled = await session.generate(row.token_ids)
    tokens = row.token_ids + sampled.token_ids + session.next_prompt([{"role": "user", "content": "q"}])[-3:]
    await session.generate(tokens)
    await session.generate(row.token_ids)
    return 1.0


async def other_prompt(session: Any, row: Any) -> float:
    await session.generate(row.token_ids[1:])
    return 1.0


def played(stage: SetUp, episode: Any) -> Any:
    stage = stage(lambda *_: "said", episode)
    (attempt,) = stage.attempts()
    (outcome,) = stage.play(attempts=[replace(attempt, request=replace(attempt.request, images=IMAGES))])
    return outcome


def test_session_sequences_have_images_of_row(stage: SetUp) -> None:
    outcome = played(stage, two_turns)
    assert outcome.error is None
    assert [trajectory.images is IMAGES for trajectory in outcome.trajectories] == [True, True]


def test_session_other_prompt_than_row_with_images_is_error(stage: SetUp) -> None:
    outcome = played(stage, other_prompt)
    assert "tokens that do not begin with its prompt" in str(outcome.error)
