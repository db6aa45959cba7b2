"""Conversion of an episode's return value, error or limit to its outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real

import numpy as np

from mcore_rl.errors import DataError
from mcore_rl.rollout.episodes.session import Sampled, Session
from mcore_rl.types import NOT_SAMPLED, EpisodeOutcome, TokenSets, Trajectory, extra_of_turns

STOP, LENGTH, ERROR = "stop", "length", "error"


@dataclass(frozen=True)
class EpisodeResult:
    """Detailed return value of an episode, as an alternative to a number, a dict like a reward function's, or None.

    reward: None: graders compute it. sampled: turns whose sequences are trained; None: all. token_ids with mask, [S]
    each: the only trained sequence, given as tokens; mask is 1 for sampled tokens to train.
    """

    reward: float | None = None
    accuracy: float | None = None
    parts: Mapping[str, float | str] = field(default_factory=dict)
    sampled: Sequence[Sampled] | None = None
    token_ids: Sequence[int] | None = None
    mask: Sequence[int] | None = None


NOTHING = EpisodeResult()


def ended(session: Session, returned: object, *, reason: str | None = None) -> EpisodeOutcome:
    """Return the outcome of an episode that returned; `reason` is the limit that ended it, if any.

    Raises: DataError for an invalid return value.
    """
    result = _result(returned)
    if not session.book.sequences:
        raise DataError("it ended without calling session.generate, so there is nothing to train on")
    trajectories = _chosen(session, result)
    if reason is None:
        # An episode that catches EpisodeLimitError and returns a result was still ended by the limit.
        reason = session.limits.reached or (LENGTH if session.truncated else STOP)
    return _outcome(session, trajectories, reason, result)


def failed(session: Session, error: str, traceback: str | None, end_id: int, version: int) -> EpisodeOutcome:
    """Return the outcome of an episode that raised an error: its sequences, none of which is trained. `end_id` is used
    as the response of an episode that sampled nothing."""
    # Every response needs a trajectory, since groups have a fixed number of responses.
    trajectories = [sequence.trajectory(trained=False) for sequence in session.book.sequences]
    if not trajectories:
        prompt_ids, zero = np.asarray(session.prompt_ids, np.int32), np.zeros(1, np.float32)
        token, versions = np.array([end_id], np.int32), np.array([version], np.int32)
        kept = TokenSets.empty(1) if session.keeps_sets else None
        trajectories = [Trajectory(prompt_ids, token, zero, versions, np.zeros(1, np.uint8), zero, kept=kept)]
    return replace(_outcome(session, trajectories, ERROR), error=error, traceback=traceback)


def _outcome(
    session: Session, trajectories: Sequence[Trajectory], reason: str, result: EpisodeResult = NOTHING
) -> EpisodeOutcome:
    tool_parts = {f"tool_{name}": sum(values) / len(values) for name, values in session.tool_metrics.items()}
    return EpisodeOutcome(
        tuple(trajectories),
        session.response_text,
        reason,
        reward=result.reward,
        accuracy=result.accuracy,
        turns=session.num_turns,
        tool_calls=session.num_tool_calls,
        tool_errors=session.num_tool_errors,
        seconds=dict(session.seconds),
        extra={**extra_of_turns(session.num_turns, session.tool_rewards), **session.extra},
        messages=session.transcript(),
        parts={**tool_parts, **result.parts},
    )


def _result(returned: object) -> EpisodeResult:
    if returned is None:
        return NOTHING
    if isinstance(returned, EpisodeResult):
        _finite(returned.reward, "reward")
        return returned
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise DataError(f"it returned a dict without score ({', '.join(map(str, returned)) or 'empty'})")
        score, accuracy = _finite(returned["score"], "score"), returned.get("acc")
        parts = {str(k): _part(v) for k, v in returned.items() if k not in ("score", "acc") and v is not None}
        return EpisodeResult(score, _finite(accuracy, "acc"), parts)
    return EpisodeResult(_finite(returned, "reward"))


def _finite(value: object, name: str) -> float | None:
    if value is None:
        return None
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real) or not math.isfinite(float(number)):
        raise DataError(f"it returned {name} {str(value)[:80]!r} instead of a finite number")
    return float(number)


def _part(value: object) -> float | str:
    return float(value) if isinstance(value, Real) and math.isfinite(float(value)) else str(value)


def _chosen(session: Session, result: EpisodeResult) -> list[Trajectory]:
    if result.token_ids is not None:
        return [_as_returned(session, result.token_ids, result.mask)]
    sequences = session.book.sequences
    if result.sampled is not None:
        sequences = list(dict.fromkeys(turn.sequence for turn in result.sampled))
        if not sequences:
            raise DataError("EpisodeResult.sampled is empty; omit it to train on everything")
    return [sequence.trajectory() for sequence in sequences]


def _as_returned(session: Session, token_ids: Sequence[int], mask: Sequence[int] | None) -> Trajectory:
    """Return the sequence that an episode gave as tokens; it must be one that it sampled."""
    ids = np.asarray(token_ids, np.int32)
    # Only sampled tokens have log-probabilities; text that was tokenized again usually gives other tokens.
    sequence = next((s for s in session.book.sequences if np.array_equal(s.tokens, ids)), None)
    if sequence is None:
        raise DataError(
            f"it returned {len(ids)} tokens that differ from the sampled ones; return the tokens that were passed to "
            "and returned by session.generate, never text that was tokenized again"
        )
    trajectory = sequence.trajectory()
    if mask is None:
        return trajectory
    wanted = np.asarray(mask, np.uint8)[sequence.num_prompt :]
    if len(np.asarray(mask)) != len(ids):
        raise DataError(f"it returned a mask of length {len(np.asarray(mask))} for {len(ids)} tokens")
    if (wanted[trajectory.versions == NOT_SAMPLED] > 0).any():
        raise DataError("its mask trains tokens that were not sampled, such as a tool's result")
    return replace(trajectory, trained=wanted)
