"""Concatenation of the scalars of several calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mcore_rl.rollout.results import join_scalars
from mcore_rl.types import RolloutScalars


def scalars(groups: list[int]) -> RolloutScalars:
    ids, numbers = np.array(groups), np.zeros(len(groups), np.float32)
    ints = np.zeros(len(groups), np.int32)
    return RolloutScalars(
        ids, ids, ints, ints, ints, numbers, numbers, ints.astype(np.uint8), np.zeros((len(groups), 2), np.int32)
    )


def test_join_scalars_errors_tokens_and_seconds() -> None:
    first = replace(scalars([1, 1, 2]), errors=((1, "a"),), tokens_taken_over=5, seconds_generating=2.0)
    first = replace(first, version_tokens=((3, 7), (4, 1)))
    second = replace(
        scalars([2]), errors=((0, "b"),), traceback="at b", tokens_taken_over=7, parts={"half": np.array([0.5])}
    )
    second = replace(second, version_tokens=((4, 2),))
    joined = join_scalars([first, second])
    assert joined.group_ids.tolist() == [1, 1, 2, 2]
    assert joined.version_tokens == ((3, 7), (4, 1), (4, 2))
    assert joined.errors == ((1, "a"), (3, "b"))
    assert (joined.traceback, joined.tokens_taken_over, joined.seconds_generating) == ("at b", 12, 2.0)
    np.testing.assert_array_equal(joined.parts["half"], [np.nan, np.nan, np.nan, 0.5])
