"""Rows with images: processed once per prompt; every sequence of an episode begins with the row's prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mcore_rl.types import Prompt, PromptImages, RolloutTask, SamplingOptions
from tests.unit.rollout.episodes.conftest import SetUp
from tests.unit.rollout.test_worker import PROMPTS, BackwardsEngine, LengthRewarder, worker_of

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


class CountingProcessor:
    """Image processor that counts its calls."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def process(self, sources: object, token_ids: np.ndarray, where: str) -> PromptImages:
        self.rows.append(where)
        return IMAGES


def test_worker_processes_images_once_per_prompt() -> None:
    """Graders, in other processes, receive no images."""
    rewarder = PromptRewarder()
    prompts = [replace(prompt, images=(b"file",) if prompt.row == 1 else ()) for prompt in PROMPTS["train"]]
    worker = worker_of(BackwardsEngine(), rewarder)
    worker.prompts, worker.images = {"train": prompts}, CountingProcessor()  # type: ignore[assignment]
    task = RolloutTask("train", np.array([1, 2]), np.array([5, 6]), 3, SamplingOptions(4), 1)
    found = worker.run(task)
    assert found is not None
    assert worker.images.rows == ["prompt 2 of train"]  # type: ignore[union-attr]
    assert len(found[0].images) == 1
    assert found[0].image_rows is not None
    assert found[0].image_rows.tolist() == [0, 0, 0, -1, -1, -1]
    assert [prompt.images for prompt in rewarder.prompts] == [()] * 6


class PromptRewarder(LengthRewarder):
    """Keeps the prompts that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Prompt] = []

    def submit(self, key: int, prompt: Prompt, *rest: Any, **batch: object) -> None:
        self.prompts.append(prompt)
        super().submit(key, prompt, *rest, **batch)
