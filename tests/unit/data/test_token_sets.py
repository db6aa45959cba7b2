"""Sets of token ids per token, in memory, in trajectories and in files, against Python's sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.data.image_arrays import array_buffers, buffer_arrays
from mcore_rl.data.trajectories import join_rows, take_rows
from mcore_rl.errors import McoreRLError
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import TokenSets, Trajectory
from mcore_rl.types.token_sets import BITS, encode_ids, max_set_words

VOCABULARY = 150
SIZES = (1, 2, 5, 6, 7, 40, 149, 150, 0, 3)
"""5 words of bits: a set of 6 ids is a list, one of 7 ids a bit set."""


def python_sets(first: int = 0) -> list[set[int]]:
    generator = np.random.default_rng(first)
    return [set(generator.permutation(VOCABULARY)[:size].tolist()) for size in SIZES]


def encoded(sets: list[set[int]]) -> TokenSets:
    return TokenSets.of([encode_ids(np.array(sorted(each), np.int64), VOCABULARY) for each in sets])


def decoded(sets: TokenSets) -> list[set[int]]:
    """Decode by asking for every id."""
    found = np.stack([sets.contain(np.full(len(sets), token)) for token in range(VOCABULARY)], 1)
    return [set(np.flatnonzero(row).tolist()) for row in found]


def test_token_sets_contain_exactly_their_ids() -> None:
    sets = encoded(python_sets())
    assert decoded(sets) == python_sets()
    assert sets.sizes().tolist() == list(SIZES)
    assert sets.are_bits.tolist() == [size > 6 for size in SIZES]
    # An id beyond the bit set is in no set.
    assert not sets.contain(np.full(len(SIZES), 5000)).any()


def test_encode_ids_takes_the_shorter_form() -> None:
    lengths = [len(encode_ids(np.arange(size), VOCABULARY)) for size in range(VOCABULARY + 1)]
    assert lengths == [min(size, max_set_words(VOCABULARY)) for size in range(VOCABULARY + 1)]
    assert encode_ids(np.arange(7), VOCABULARY).tolist() == [BITS, 0b1111111, 0, 0, 0, 0]
    # The highest bit of a word is its sign.
    assert encode_ids(np.arange(64), 64).tolist() == [BITS, -1, -1]


def test_token_sets_take_and_join_keep_every_set() -> None:
    first, second = encoded(python_sets()), encoded(python_sets(1))
    rows = np.array([9, 0, 5, 5, 8])
    assert decoded(first.take(rows)) == [python_sets()[row] for row in rows]
    joined = TokenSets.joined([first, TokenSets.empty(2), second])
    assert decoded(joined) == [*python_sets(), set(), set(), *python_sets(1)]
    assert joined.offsets.dtype == np.int64
    assert len(TokenSets.joined([])) == 0
    assert len(first.take(np.empty(0, np.int64))) == 0


def trajectory(number: int, sets: TokenSets | None) -> Trajectory:
    ids = np.arange(len(SIZES), dtype=np.int32) + 100 * number
    return Trajectory(ids[:2], ids, -ids.astype(np.float32), 0 * ids, kept=sets)


def test_trajectories_carry_their_sets() -> None:
    packed = pack_trajectories([trajectory(n, encoded(python_sets(n))) for n in range(3)])
    assert packed.kept is not None
    assert packed.kept.words.dtype == np.int32
    joined = join_rows([take_rows(packed, np.array([2, 0])), packed])
    assert joined.kept is not None
    assert decoded(joined.kept) == [each for n in (2, 0, 0, 1, 2) for each in python_sets(n)]
    read = array_buffers(buffer_arrays(joined))
    assert read.kept is not None
    assert decoded(read.kept) == decoded(joined.kept)
    plain = pack_trajectories([trajectory(0, None)])
    assert plain.kept is take_rows(plain, np.array([0])).kept is None


@pytest.mark.parametrize("first", [0, 1])
def test_join_rows_does_not_drop_the_sets_of_some_buffers(first: int) -> None:
    parts = [pack_trajectories([trajectory(0, encoded(python_sets()))]), pack_trajectories([trajectory(1, None)])]
    with pytest.raises(ValueError, match="1 of 2 buffers have no kept_"):
        join_rows([parts[first], parts[1 - first]])


def test_trajectories_without_sets_beside_others_are_named() -> None:
    given = [trajectory(0, encoded(python_sets())), trajectory(1, None)]
    message = r"keep_sampling_mask=true: 1 of 2 responses ended without the sets .*: 8\.1"
    with pytest.raises(McoreRLError, match=message):
        pack_trajectories(given, ["8.0", "8.1"])
    assert pack_trajectories([replace(each, kept=None) for each in given]).kept is None
