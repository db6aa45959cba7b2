"""Concatenation of the scalars of several engine calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from mcore_rl.types import RolloutScalars


def join_scalars(parts: Sequence[RolloutScalars]) -> RolloutScalars:
    """Concatenate all responses. Seconds are the maximum, since the calls ran concurrently."""
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(RolloutScalars)
        if isinstance(getattr(parts[0], field.name), np.ndarray) and field.name != "episodes"
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


def _joined_episodes(parts: Sequence[RolloutScalars], starts: Sequence[int]) -> np.ndarray | None:
    if all(part.episodes is None for part in parts):
        return None
    return np.concatenate(
        [
            start + (np.arange(len(part.rewards)) if part.episodes is None else part.episodes)
            for part, start in zip(parts, starts, strict=False)
        ]
    )
