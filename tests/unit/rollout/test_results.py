"""Concatenation of the scalars of several calls, and failures of grading: the first is shown, and too many end the
run."""

from __future__ import annotations

import base64
import json
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mcore_rl.config.reward import RewardConfig
from mcore_rl.data.chat.messages import answer_content
from mcore_rl.errors import ConfigError, RewardError
from mcore_rl.rollout.episodes.single_turn import Attempt
from mcore_rl.rollout.results import GradingFailures, Response, join_scalars, scalars_of, write_records
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import (
    EpisodeOutcome,
    GenerationRequest,
    Prompt,
    RolloutScalars,
    RolloutTask,
    SamplingOptions,
    Score,
    Trajectory,
)
from tests.unit.rollout.made import made_scalars
from tests.vision_models import png

TRACEBACK = 'Traceback (most recent call last):\n  File "mine.py", line 3, in f'


def test_join_scalars_errors_tokens_and_seconds() -> None:
    given = {"tokens_taken_over": 5, "seconds_generating": 2.0, "version_tokens": ((3, 7), (4, 1))}
    first = made_scalars([1, 1, 2], errors=((1, "a"),), **given)
    given = {"tokens_taken_over": 7, "parts": {"half": np.array([0.5])}, "version_tokens": ((4, 2),)}
    second = made_scalars([2], errors=((0, "b"),), traceback="at b", **given)
    joined = join_scalars([first, second])
    assert joined.group_ids.tolist() == [1, 1, 2, 2]
    assert joined.version_tokens == ((3, 7), (4, 1), (4, 2))
    assert joined.errors == ((1, "a"), (3, "b"))
    assert (joined.traceback, joined.tokens_taken_over, joined.seconds_generating) == ("at b", 12, 2.0)
    np.testing.assert_array_equal(joined.parts["half"], [np.nan, np.nan, np.nan, 0.5])


def test_scalars_of_roles_separate_the_rewards_of_their_turns(tmp_path: Path) -> None:
    zeros, sampling = np.zeros(2, np.float32), SamplingOptions(8)
    ids = np.array([3, 4], np.int32)
    solver, critic = (
        Trajectory(ids, ids, zeros, zeros.astype(np.int32), rewards=np.array([0, reward], np.float32), role=role)
        for role, reward in (("solver", 0.5), ("critic", 2))
    )
    attempt = Attempt(GenerationRequest("train.0.0", ids, 1, sampling), Prompt(0, ids, "34", "", None))
    outcomes = [EpisodeOutcome((solver, critic, solver), "", "stop"), EpisodeOutcome((critic,), "", "stop")]
    responses = [Response(attempt, outcome, Score(4.0, 1.0)) for outcome in outcomes]
    task = RolloutTask("train", np.array([0]), np.array([0]), 2, sampling, 1)
    buffers = pack_trajectories([solver, critic, solver, critic])
    scalars = scalars_of(task, responses, buffers, (0.0, 0.0))
    assert scalars.roles is not None
    assert scalars.other_rewards is not None
    assert scalars.roles.tolist() == ["solver", "critic", "solver", "critic"]
    assert scalars.other_rewards.tolist() == [2, 1, 2, 0]
    joined = join_scalars([made_scalars([1]), scalars])
    assert joined.roles is not None
    assert joined.other_rewards is not None
    assert joined.roles.tolist() == ["", "solver", "critic", "solver", "critic"]
    assert joined.other_rewards.tolist() == [0, 2, 1, 2, 0]
    write_records(tmp_path / "part", task, responses)
    records = [json.loads(line) for line in (tmp_path / "part").read_text().splitlines()]
    assert [record["role"] for record in records] == ["solver", "critic", "solver", "critic"]
    # Its reward is 0, without rewards of turns.
    responses[0] = Response(attempt, outcomes[0], Score(0.0, 0.0, error="the grader raised"))
    ungraded = scalars_of(task, responses, buffers, (0.0, 0.0)).other_rewards
    assert ungraded is not None
    assert ungraded.tolist() == [0, 0, 0, 0]


def test_write_records_digest_covers_prompt_and_response(tmp_path: Path) -> None:
    """Trainer ranks compute the same digest from the whole sequence, int32."""
    ids, sampling = np.array([3, 4], np.int64), SamplingOptions(8)
    attempt = Attempt(GenerationRequest("train.0.0", ids, 1, sampling), Prompt(0, ids, "34", "", None))
    zeros = np.zeros(2)
    trajectory = Trajectory(ids, np.array([5, 6], np.int64), zeros, zeros.astype(np.int32))
    task = RolloutTask("train", np.array([0]), np.array([0]), 1, sampling, 1)
    response = Response(attempt, EpisodeOutcome((trajectory,), "56", "stop"), Score(1.0, 1.0))
    write_records(tmp_path / "part", task, [response])
    record = json.loads((tmp_path / "part").read_text())
    assert record["digest"] == zlib.crc32(np.array([3, 4, 5, 6], np.int32).tobytes())


def test_write_records_prompt_with_image_has_thumbnail(tmp_path: Path) -> None:
    ids, sampling = np.array([3, 4], np.int32), SamplingOptions(8)
    prompt = Prompt(0, ids, "34", "", None, images=(png(300, 200),))
    attempt = Attempt(GenerationRequest("train.0.0", ids, 1, sampling), prompt)
    zeros = np.zeros(2)
    outcome = EpisodeOutcome((Trajectory(ids, ids, zeros, zeros.astype(np.int32)),), "34", "stop")
    task = RolloutTask("train", np.array([0]), np.array([0]), 2, sampling, 1)
    write_records(tmp_path / "part", task, [Response(attempt, outcome, Score(1.0, 1.0))] * 2)
    for line in (tmp_path / "part").read_text().splitlines():
        (uri,) = json.loads(line)["images"]
        with Image.open(BytesIO(base64.b64decode(uri.removeprefix("data:image/jpeg;base64,")))) as image:
            assert image.size == (85, 128)


def test_write_records_conversation_has_thumbnails_of_answers(tmp_path: Path) -> None:
    ids, sampling, zeros = np.array([3, 4], np.int32), SamplingOptions(8), np.zeros(2)
    attempt = Attempt(GenerationRequest("train.0.0", ids, 1, sampling), Prompt(0, ids, "34", "", None))
    content = answer_content("seen", [png(300, 200)] * 6)
    trained = Trajectory(ids, ids, zeros, zeros.astype(np.int32), np.ones(2, np.uint8))
    outcome = EpisodeOutcome((trained,), "34", "stop", messages=[{"role": "tool", "content": content}])
    task = RolloutTask("train", np.array([0]), np.array([0]), 1, sampling, 1)
    write_records(tmp_path / "part", task, [Response(attempt, outcome, Score(1.0, 1.0))])
    (message,) = json.loads((tmp_path / "part").read_text())["messages"]
    *images, text = message["content"]
    assert text == {"type": "text", "text": "seen"}
    assert [image.get("image", "")[:22] for image in images] == ["data:image/jpeg;base64"] * 4 + [""] * 2


def graded(size: int, *failed: int, traceback: str | None = None) -> RolloutScalars:
    return made_scalars([0] * size, errors=tuple((i, f"error {i}") for i in failed), traceback=traceback)


def watched(**config: float) -> tuple[GradingFailures, list[str]]:
    notes: list[str] = []
    return GradingFailures(RewardConfig(function="mine.py:f", **config), notes.append), notes


def test_failures_first_is_shown_once_with_traceback() -> None:
    failures, notes = watched()
    failures.check([graded(4), graded(4)], "step 1", "file")
    assert notes == []
    failures.check([graded(4, 2), graded(4, 0, traceback=TRACEBACK)], "step 2", "file")
    failures.check([graded(4, 1)], "step 3", "file")
    assert len(notes) == 1
    assert notes[0].startswith("warning: reward.function=mine.py:f: error 2; its reward is 0;")
    assert notes[0].endswith(TRACEBACK)


@pytest.mark.parametrize(("fraction", "failed"), [(1.0, 4), (0.5, 2), (0.0, 1)])
def test_failures_of_the_fraction_end_the_run(fraction: float, failed: int) -> None:
    def check(failed: int) -> None:
        given = [graded(3, *range(min(failed, 3))), graded(1, *range(failed - 3))]
        failures.check(given, "step 7", "rollouts/step_7.jsonl")

    failures, _ = watched(max_error_fraction=fraction)
    check(failed - 1)
    with pytest.raises(RewardError) as caught:
        check(failed)
    assert caught.value.exit_code == 1
    assert not isinstance(caught.value, ConfigError)
    assert str(caught.value) == (
        f"reward.function=mine.py:f failed on {failed} of 4 responses of step 7, which reaches "
        f"reward.max_error_fraction={fraction:g}; first error: error 0; all errors are in rollouts/step_7.jsonl"
    )
