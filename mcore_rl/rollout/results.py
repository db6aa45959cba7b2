"""Scalars of responses for the driver, their records for the rollout files, and the handling of failed grading."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from mcore_rl.config.reward import RewardConfig
from mcore_rl.data.checksum import token_digest
from mcore_rl.data.json_text import to_plain
from mcore_rl.data.records import SURROGATE_ERRORS
from mcore_rl.errors import RewardError
from mcore_rl.rollout.episodes.single_turn import Attempt
from mcore_rl.rollout.trajectories import temperature_spans, version_spans
from mcore_rl.types import EpisodeOutcome, Grades, RolloutScalars, RolloutTask, Score, Trajectory, TrajectoryBuffers
from mcore_rl.vision.thumbnails import thumbnails, with_thumbnails

FAILED_EPISODE = "the episode failed"
"""Prefix of error messages for failed episodes."""
ROLE_COLUMNS = ("roles", "other_rewards")
"""Columns of RolloutScalars that only episodes with named roles have."""
LIMIT_REASONS = ("length", "turns", "tool_calls", "seconds")
"""Finish reasons of responses that a limit ended."""


@dataclass(frozen=True)
class Response:
    """An attempt, its outcome and its score."""

    attempt: Attempt
    outcome: EpisodeOutcome
    score: Score


def scalars_of(
    task: RolloutTask, responses: Sequence[Response], buffers: TrajectoryBuffers, seconds: tuple[float, float]
) -> RolloutScalars:
    """Build the scalars: one row per trajectory, in the order of `responses`. All trajectories of an episode have its
    results. `seconds`: time of generating and of grading."""
    # An episode may have several trajectories, one row each; `first` is the row of its episode's first trajectory.
    counts = np.array([len(r.outcome.trajectories) for r in responses], np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    groups = (task.span[0] + np.arange(len(responses))) // task.samples_per_prompt
    scores = [r.score for r in responses for _ in r.outcome.trajectories]
    edges = buffers.response_offsets[:-1], buffers.response_offsets[1:] - 1
    trained = np.add.reduceat(buffers.trained, edges[0], dtype=np.int64) if scores else np.empty(0)
    roles, other_rewards = _roles_of(responses)
    drawn_by, drawn = np.unique(buffers.versions[buffers.trained != 0], return_counts=True)
    return RolloutScalars(
        group_ids=np.repeat(task.group_ids[groups], counts),
        prompt_rows=np.repeat(task.prompt_rows[groups], counts),
        total_tokens=np.diff(buffers.token_offsets).astype(np.int32),
        response_tokens=np.diff(buffers.response_offsets).astype(np.int32),
        trained_tokens=trained.astype(np.int32),
        clipped=np.repeat([r.outcome.finish_reason in LIMIT_REASONS for r in responses], counts).astype(np.uint8),
        versions=np.stack([buffers.versions[edge] for edge in edges], axis=1).astype(np.int32),
        episodes=first if (counts > 1).any() else None,
        episode_metrics=_episode_metrics([r.outcome for r in responses], counts),
        digests=_digests(responses),
        version_tokens=tuple(zip(drawn_by.tolist(), drawn.tolist(), strict=True)),
        seconds_generating=seconds[0],
        seconds_grading=seconds[1],
        tokens_taken_over=sum(r.outcome.taken_over for r in responses),
        roles=roles,
        other_rewards=other_rewards,
        **vars(grades_of(scores)),
    )


def _roles_of(responses: Sequence[Response]) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return roles and other_rewards of RolloutScalars, one entry per trajectory; None if no role has a name. A
    response without a grade has the reward 0, without rewards of turns."""
    episodes = [response.outcome.trajectories for response in responses]
    roles = [each.role for trajectories in episodes for each in trajectories]
    if not any(roles):
        return None, None
    others = list[float]()
    for response, trajectories in zip(responses, episodes, strict=True):
        if response.score.error is not None:
            others += [0.0] * len(trajectories)
            continue
        of_roles: defaultdict[str, float] = defaultdict(float)
        for each in trajectories:
            of_roles[each.role] += 0.0 if each.rewards is None else float(each.rewards.sum(dtype=np.float64))
        others += [sum(value for role, value in of_roles.items() if role != each.role) for each in trajectories]
    return np.array(roles), np.array(others, np.float32)


def grades_of(scores: Sequence[Score]) -> Grades:
    """Convert scores to the arrays of Grades."""
    return Grades(
        rewards=np.array([s.reward for s in scores], np.float32),
        accuracies=np.array([s.accuracy for s in scores], np.float32),
        errors=tuple((i, s.error) for i, s in enumerate(scores) if s.error is not None),
        parts=_numbers(scores),
        traceback=next((s.traceback for s in scores if s.traceback is not None), None),
    )


def _numbers(scores: Sequence[Score]) -> dict[str, np.ndarray]:
    """Collect the numeric parts of scores by name; NaN if a response has none. Shapes: float64 [B]."""
    numbers: defaultdict[str, np.ndarray] = defaultdict(lambda: np.full(len(scores), np.nan))
    for index, score in enumerate(scores):
        for name, value in score.parts.items():
            if isinstance(value, float):
                numbers[name][index] = value
    return dict(sorted(numbers.items()))


def _episode_metrics(outcomes: Sequence[EpisodeOutcome], counts: np.ndarray) -> dict[str, np.ndarray]:
    """Collect the metrics of multi-turn episodes; {} for single turns."""
    if not any(outcome.seconds for outcome in outcomes):
        return {}
    columns = {
        "episode/turns": [outcome.turns for outcome in outcomes],
        "episode/tool_calls": [outcome.tool_calls for outcome in outcomes],
        "episode/tool_errors": [outcome.tool_errors for outcome in outcomes],
        "episode/failed": [outcome.error is not None for outcome in outcomes],
    }
    for state in ("generating", "tool_calling"):
        columns[f"episode/seconds_{state}"] = [outcome.seconds.get(state, 0.0) for outcome in outcomes]
    return {name: np.repeat(np.array(values, np.float64), counts) for name, values in columns.items()}


def _digests(responses: Sequence[Response]) -> np.ndarray:
    trajectories = [t for r in responses for t in r.outcome.trajectories]
    return np.array([token_digest(np.concatenate([t.prompt_ids, t.token_ids])) for t in trajectories], np.uint32)


def write_records(path: Path, task: RolloutTask, responses: Sequence[Response]) -> None:
    """Write one JSON object per trajectory."""
    # A text can contain half of a surrogate pair, such as a truncated emoji, which UTF-8 cannot encode.
    of_group: dict[int, list[str]] = {}
    with open(path, "w", encoding="utf-8", errors=SURROGATE_ERRORS) as file:
        for index, response in enumerate(responses, start=task.span[0]):
            place = int(task.group_ids[index // task.samples_per_prompt]), index % task.samples_per_prompt
            # Once per prompt: an image may have several megabytes.
            if (sources := response.attempt.prompt.images) and place[0] not in of_group:
                of_group[place[0]] = thumbnails(sources)
            for trajectory in response.outcome.trajectories:
                record = _record(response, trajectory, *place, task.version)
                if sources:
                    record["images"] = of_group[place[0]]
                file.write(json.dumps(record, ensure_ascii=False, default=to_plain) + "\n")


def _record(response: Response, trajectory: Trajectory, group: int, sample: int, submitted: int) -> dict[str, object]:
    prompt, outcome, score = response.attempt.prompt, response.outcome, response.score
    record: dict[str, object] = {
        **score.parts,
        "prompt": prompt.text,
        "response": outcome.text,
        "reward": score.reward,
        "accuracy": score.accuracy,
        "tokens": len(trajectory.token_ids),
        "finish_reason": outcome.finish_reason,
        "group": group,
        "sample": sample,
        "version": int(trajectory.versions[0]),
        "versions": version_spans(trajectory.versions),
        "submitted_version": submitted,
        "ground_truth": prompt.ground_truth,
        "error": score.error,
        "turns": outcome.turns,
        "tool_calls": outcome.tool_calls,
        # Connects the record with its per-token values, which a trainer rank writes.
        "digest": token_digest(np.concatenate([trajectory.prompt_ids, trajectory.token_ids])),
    }
    if trajectory.trained is not None:
        record |= {"messages": with_thumbnails(outcome.messages), "mask": trajectory.trained.tolist()}
    if trajectory.role:
        record["role"] = trajectory.role
    if trajectory.temperatures is not None:
        record["temperatures"] = temperature_spans(trajectory.temperatures)
    if trajectory.rewards is not None and trajectory.rewards.any():
        places = np.flatnonzero(trajectory.rewards).tolist()
        record["turn_rewards"] = [[place, float(trajectory.rewards[place])] for place in places]
    return record


def join_scalars(parts: Sequence[RolloutScalars]) -> RolloutScalars:
    """Concatenate all responses. Seconds are the maximum, since the calls ran concurrently."""
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(RolloutScalars)
        # `episodes` holds row numbers, which shift by the rows of the parts before. Only some parts may have roles.
        if isinstance(getattr(parts[0], field.name), np.ndarray) and field.name not in ("episodes", *ROLE_COLUMNS)
    }
    lengths = [len(part.rewards) for part in parts]
    starts = np.cumsum([0, *lengths]).tolist()
    errors = [(start + i, text) for start, part in zip(starts, parts, strict=False) for i, text in part.errors]
    return RolloutScalars(
        **arrays,
        errors=tuple(errors),
        scores={name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores},
        parts=_joined_numbers([part.parts for part in parts], lengths),
        episodes=_joined_episodes(parts, starts),
        episode_metrics=_joined_numbers([part.episode_metrics for part in parts], lengths),
        roles=_joined_column([part.roles for part in parts], lengths, ""),
        other_rewards=_joined_column([part.other_rewards for part in parts], lengths, np.float32(0)),
        traceback=next((part.traceback for part in parts if part.traceback), None),
        seconds_generating=max(part.seconds_generating for part in parts),
        seconds_grading=max(part.seconds_grading for part in parts),
        tokens_taken_over=sum(part.tokens_taken_over for part in parts),
        version_tokens=tuple(entry for part in parts for entry in part.version_tokens),
    )


def _joined_numbers(parts: Sequence[Mapping[str, np.ndarray]], lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """Concatenate by name; NaN for parts without a name."""
    names = sorted({name for part in parts for name in part})
    lacking = [np.full(length, np.nan) for length in lengths]
    return {
        name: np.concatenate([part.get(name, none) for part, none in zip(parts, lacking, strict=True)])
        for name in names
    }


def _joined_column(
    parts: Sequence[np.ndarray | None], lengths: Sequence[int], default: str | np.float32
) -> np.ndarray | None:
    """Concatenate; parts without the column get the default. None if no part has it."""
    if all(part is None for part in parts):
        return None
    filled = [np.full(n, default) if part is None else part for part, n in zip(parts, lengths, strict=True)]
    return np.concatenate(filled)


def _joined_episodes(parts: Sequence[RolloutScalars], starts: Sequence[int]) -> np.ndarray | None:
    if all(part.episodes is None for part in parts):
        return None
    numbers = [np.arange(len(part.rewards)) if part.episodes is None else part.episodes for part in parts]
    return np.concatenate([start + of_part for start, of_part in zip(starts, numbers, strict=False)])


@dataclass
class GradingFailures:
    """Grading failures of one run; `note` prints a text to the user."""

    config: RewardConfig
    note: Callable[[str], None]
    _shown: bool = field(default=False, init=False)

    def check(self, graded: Sequence[RolloutScalars], what: str, records: str) -> None:
        """Check all responses of `what` (such as "step 3"), which are in the file `records`.

        Raises: RewardError if at least one, and reward.max_error_fraction of them, could not be graded.
        """
        errors = [message for scalars in graded for _, message in scalars.errors]
        if not errors:
            return
        source = "rollout.episode" if errors[0].startswith(FAILED_EPISODE) else self.config.chosen
        responses = sum(len(scalars.rewards) for scalars in graded)
        if not self._shown:
            self._shown = True
            traceback = next((scalars.traceback for scalars in graded if scalars.traceback), None)
            counted = "its reward is 0; later failures are only counted (reward/errors) and recorded"
            self.note(f"warning: {source}: {errors[0]}; {counted}" + (f"\n{traceback}" if traceback else ""))
        # Not `>`: with a fraction of 1, a run in which every response fails must end.
        if len(errors) >= self.config.max_error_fraction * responses:
            raise RewardError(
                f"{source} failed on {len(errors)} of {responses} responses of {what}, which reaches "
                f"reward.max_error_fraction={self.config.max_error_fraction:g}; first error: {errors[0]}; all errors "
                f"are in {records}"
            )
