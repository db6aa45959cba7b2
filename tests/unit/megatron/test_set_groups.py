"""Division of sampling sets into groups with common columns."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.megatron.step import set_groups
from mcore_rl.megatron.step.kept_tokens import SET_BYTES
from mcore_rl.megatron.step.set_groups import COSTS, GroupCosts, HostGroup, group_sets
from mcore_rl.types.token_sets import TokenSets, encode_ids

VOCABULARY = 300
FREE, FORBIDDEN = GroupCosts(0, 0), GroupCosts(10**6, 0)
SETS = [
    *([7, 9, 200 + token] for token in range(4)),  # lists with common ids
    *([3 * token] for token in range(4)),
    list(range(0, 299, 2)),  # bit sets
    list(range(1, 120)),
    list(range(300)),  # the first entries of the vocabulary
    list(range(64)),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_groups, "BLOCK_TOKENS", 2)


def token_sets(sets: list[list[int]]) -> TokenSets:
    return TokenSets.of([encode_ids(np.array(ids), VOCABULARY) for ids in sets])


def decoded(groups: list[HostGroup]) -> dict[int, list[int]]:
    """Read the set of each token from its group."""
    found: dict[int, list[int]] = {}
    for group in groups:
        ids = np.arange(group.num_columns) if group.ids is None else group.ids
        for row, token in enumerate(group.tokens.tolist()):
            assert token not in found
            kept = slice(None)
            if group.bits is not None:
                kept = np.unpackbits(group.bits[row], bitorder="little", count=group.num_columns).astype(bool)
            found[token] = ids[kept].tolist()
    return found


@pytest.mark.parametrize("costs", [FREE, GroupCosts(1, 200), FORBIDDEN])
def test_groups_contain_every_set_once(costs: GroupCosts) -> None:
    assert decoded(group_sets(token_sets(SETS), costs)) == dict(enumerate(SETS))


def test_groups_of_lists_have_the_columns_of_their_tokens() -> None:
    lists = [group for group in group_sets(token_sets(SETS), FREE) if group.ids is not None]
    assert [group.num_columns for group in lists] == [2, 2, 4, 4]
    assert [group.tokens.tolist() for group in lists] == [[4, 5], [6, 7], [0, 1], [2, 3]]


def test_groups_with_costly_launches_are_joined() -> None:
    lists = [group for group in group_sets(token_sets(SETS), GroupCosts(1, 15)) if group.ids is not None]
    assert [sorted(group.tokens.tolist()) for group in lists] == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_groups_with_costly_copies_use_all_columns() -> None:
    """300 columns take 38 bytes of bits, at most 8 for each of the 5 ids."""
    large = [list(range(100 + token, 105 + token)) for token in range(4)]
    groups = group_sets(token_sets([*large, *SETS[8:]]), FORBIDDEN)
    assert [(group.num_columns, group.bits is None) for group in groups] == [(300, False), (64, True), (300, True)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("num_tokens", [31, 2048, 8192])
def test_groups_of_lists_need_few_bytes_per_id(device: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of 20 ids of a large vocabulary, with Zipf's distribution, and a few large ones, as top-p leaves them."""
    monkeypatch.setattr(set_groups, "BLOCK_TOKENS", 32)
    generator, size = np.random.default_rng(0), 151_936
    ids = np.minimum(generator.zipf(1.1, (num_tokens, 20)), size) - 1
    runs = [
        np.unique(generator.permutation(size)[:800]) if token % 100 == 0 else np.unique(ids[token])
        for token in range(num_tokens)
    ]
    groups = group_sets(TokenSets.of([encode_ids(run, size) for run in runs]), COSTS[device])
    used = sum(8 * len(group.ids) for group in groups if group.ids is not None)
    used += sum(group.bits.size for group in groups if group.bits is not None)
    assert used <= SET_BYTES * sum(map(len, runs))
    assert sum(len(group.tokens) for group in groups) == num_tokens


def test_group_without_large_ids_computes_no_columns_behind() -> None:
    (group,) = group_sets(token_sets(SETS[4:8]), FORBIDDEN)
    assert group.num_columns == 10


def test_groups_of_no_tokens_are_empty() -> None:
    assert group_sets(TokenSets.empty(0), FREE) == []
