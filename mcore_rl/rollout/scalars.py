"""Scalars of several calls of engines as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from mcore_rl.types import RolloutScalars


def join_scalars(parts: Sequence[RolloutScalars]) -> RolloutScalars:
    """Of all responses, part after part. What took seconds ran beside each other."""
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(RolloutScalars)
        if isinstance(getattr(parts[0], field.name), np.ndarray)
    }
    starts = np.cumsum([0, *(len(part.rewards) for part in parts)]).tolist()
    errors = [(start + i, text) for start, part in zip(starts, parts, strict=False) for i, text in part.errors]
    return RolloutScalars(
        **arrays,
        errors=tuple(errors),
        scores={name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores},
        parts=_joined_parts(parts),
        traceback=next((part.traceback for part in parts if part.traceback), None),
        seconds_generating=max(part.seconds_generating for part in parts),
        seconds_grading=max(part.seconds_grading for part in parts),
        tokens_taken_over=sum(part.tokens_taken_over for part in parts),
    )


def _joined_parts(parts: Sequence[RolloutScalars]) -> dict[str, np.ndarray]:
    """Numbers beside the scores, of every name that any engine's responses have."""
    names = sorted({name for part in parts for name in part.parts})
    lacking = [np.full(len(part.rewards), np.nan) for part in parts]
    return {
        name: np.concatenate([part.parts.get(name, none) for part, none in zip(parts, lacking, strict=True)])
        for name in names
    }
