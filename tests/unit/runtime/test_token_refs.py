"""Token columns of one model for the data-parallel ranks of another model."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.data.batching import spread
from mcore_rl.data.packing import SequenceCost
from mcore_rl.types import Batch, TokenColumn, TokenRefs
from tests.unit.rollouts import batch_of


def batch(dp_ranks: list[int]) -> Batch:
    return batch_of(dp_ranks, 2, total_tokens=np.arange(1, len(dp_ranks) + 1, dtype=np.int32))


@pytest.mark.parametrize(("mine", "others"), [(1, 1), (4, 4), (4, 2), (4, 1), (2, 4), (1, 4), (2, 6), (6, 2)])
def test_rank_receives_each_of_its_samples_from_its_holder(mine: int, others: int) -> None:
    whole = batch(np.random.default_rng(0).integers(0, mine, 48).tolist())
    moved = spread(whole, mine, others, SequenceCost())
    held = TokenRefs(tuple(set(np.flatnonzero(moved.dp_ranks == rank).tolist()) for rank in range(others)), key=1)
    for rank in range(mine):
        received = set().union(*held.overlapping(rank, mine))
        assert set(np.flatnonzero(whole.dp_ranks == rank).tolist()) <= received
    # The number of senders does not grow with the number of ranks.
    assert max(len(held.overlapping(rank, mine)) for rank in range(mine)) == max(others // mine, 1)


def test_spread_balances_tokens_of_each_update() -> None:
    moved = spread(batch([0] * 32), 1, 4, SequenceCost())
    for update in moved.updates:
        loads = np.bincount(moved.dp_ranks[update], moved.total_tokens[update], 4)
        assert loads.max() <= 1.2 * loads.mean()


def test_spread_numbers_that_do_not_divide_are_rejected() -> None:
    with pytest.raises(ValueError, match="4 and 6"):
        spread(batch([0, 1, 2, 3]), 4, 6)


def test_token_column_round_trip_keeps_samples() -> None:
    by_sample = {7: np.array([1.0, 2.0], np.float32), 3: np.empty(0, np.float32), 5: np.array([4.0], np.float32)}
    found = TokenColumn.of(by_sample).by_sample()
    assert {sample: part.tolist() for sample, part in found.items()} == {7: [1, 2], 3: [], 5: [4]}
    assert TokenColumn.of({}).by_sample() == {}
