"""Selection, concatenation and splitting of flat trajectories."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.data.trajectories import join_rows, split_rows, take_rows
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import Trajectory, TrajectoryBuffers

COUNT = 5


def buffers(first: int = 0, *, experts: bool = True) -> TrajectoryBuffers:
    """Build buffers like a rollout; every value encodes its trajectory."""
    trajectories = []
    for row in range(first, first + COUNT):
        length = row % 3 + 1
        prompt, ids = np.arange(row % 2 + 1, dtype=np.int32) + 100 * row, np.arange(length, dtype=np.int32) + 1000 * row
        chosen = np.full((len(prompt) + length - 1, 2, 2), row, np.uint8) if experts else None
        rewards = ids.astype(np.float32) / 8 if experts else None
        trajectories.append(
            Trajectory(prompt, ids, -ids.astype(np.float32), 0 * ids + row, rewards=rewards, routed_experts=chosen)
        )
    packed = pack_trajectories(trajectories)
    trained = np.arange(len(packed.trained)) % 2
    return replace(packed, trained=trained.astype(np.uint8))


def columns(of: TrajectoryBuffers, row: int) -> list[list[int]]:
    """Return all values of one trajectory."""
    tokens = slice(of.token_offsets[row], of.token_offsets[row + 1])
    responses = slice(of.response_offsets[row], of.response_offsets[row + 1])
    own = [of.tokens[tokens], of.logp_rollout[responses], of.versions[responses], of.trained[responses]]
    own += [of.prompt_tokens[[row]]] + ([] if of.routed_experts is None else [of.routed_experts[tokens]])
    own += [] if of.turn_rewards is None else [of.turn_rewards[responses]]
    return [values.tolist() for values in own]


@pytest.mark.parametrize("experts", [True, False])
def test_take_rows_copies_whole_rows_in_order(experts: bool) -> None:
    source = buffers(experts=experts)
    for rows in ([3, 0], [0, 1, 2, 3, 4], [2, 2], []):
        taken = take_rows(source, np.array(rows, np.int64))
        assert [columns(taken, at) for at in range(len(taken.prompt_tokens))] == [columns(source, row) for row in rows]
        assert len(taken.token_offsets) == len(taken.response_offsets) == len(rows) + 1
        for name in {field.name for field in fields(TrajectoryBuffers)} - {"images"}:
            before, after = getattr(source, name), getattr(taken, name)
            assert (before is None and after is None) or before.dtype == after.dtype


def test_join_rows_concatenates_parts() -> None:
    first, second = buffers(), buffers(COUNT)
    joined = join_rows([take_rows(first, np.array([1, 3])), take_rows(second, np.array([0])), first])
    expected = [(first, 1), (first, 3), (second, 0), *((first, row) for row in range(COUNT))]
    assert [columns(joined, at) for at in range(len(joined.prompt_tokens))] == [columns(*each) for each in expected]


def test_split_rows_is_inverted_by_join_rows() -> None:
    source = buffers()
    parts = split_rows(source, [2, 0, 3])
    assert [len(part.prompt_tokens) for part in parts] == [2, 0, 3]
    joined = join_rows(parts)
    assert [columns(joined, row) for row in range(COUNT)] == [columns(source, row) for row in range(COUNT)]
    with pytest.raises(AssertionError, match="counts sum to 4, not 5"):
        split_rows(source, [2, 2])


KNOWN = np.array([0.5, 0.5, 1.0, 0.25, 0.25, 0.5, 0.5, 0.5, 1.0], np.float32)


def sampled_at(*temperatures: np.ndarray | float | None) -> list[TrajectoryBuffers]:
    """Build buffers of 9 response tokens each."""
    recorded = [None if each is None else np.asarray(each, np.float32) for each in temperatures]
    return [replace(buffers(), temperatures=each) for each in recorded]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None), None),
        ((0.5, 0.5), 0.5),
        ((0.5, 0.7), [0.5] * 9 + [0.7] * 9),
        ((KNOWN, 0.7), [*KNOWN, *[0.7] * 9]),
        ((None, KNOWN), [*[np.nan] * 9, *KNOWN]),
        ((0.5, None), [0.5] * 9 + [np.nan] * 9),
    ],
)
def test_join_rows_temperatures_get_shortest_form(given: Any, expected: Any) -> None:
    joined = join_rows(sampled_at(*given)).temperatures
    assert (joined is None) == (expected is None)
    if joined is not None:
        assert joined.dtype == np.float32
        np.testing.assert_array_equal(joined, np.float32(expected))


def test_take_rows_includes_temperatures() -> None:
    (source,) = sampled_at(KNOWN)
    assert len(KNOWN) == source.response_offsets[-1]
    for row in range(COUNT):
        own = slice(*source.response_offsets[row : row + 2])
        np.testing.assert_array_equal(take_rows(source, np.array([row])).temperatures, KNOWN[own])
    (scalar,) = sampled_at(0.5)
    assert take_rows(scalar, np.array([1])).temperatures == 0.5


def test_pack_trajectories_equal_temperatures_become_scalar() -> None:
    ids = np.arange(3, dtype=np.int32)

    def packed(*temperatures: list[float] | None) -> np.ndarray | None:
        given = [None if each is None else np.array(each, np.float32) for each in temperatures]
        return pack_trajectories([Trajectory(ids, ids, ids, ids, temperatures=each) for each in given]).temperatures

    np.testing.assert_array_equal(packed([0.5, np.nan, 0.5], None), np.float32(0.5))
    np.testing.assert_array_equal(packed([0.5, 1, 1], None), np.float32([0.5, 1, 1, *[np.nan] * 3]))
    assert packed(None, None) is None
