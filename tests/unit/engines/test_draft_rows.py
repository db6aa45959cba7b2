"""Drafts: the rows that are accepted, the search for n-grams, and the counts of a step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mcore_rl.engines.drafts import LONGEST, REJECTED, SHORTEST, accept_drafts, continue_ngram, row_requests
from mcore_rl.types import DraftCounts, Mean, Total


def test_row_requests_number_the_rows_of_each_request() -> None:
    requests, places = row_requests([2, 0, 1])
    assert requests.tolist() == [0, 0, 0, 1, 2, 2]
    assert places.tolist() == [0, 1, 2, 0, 0, 1]


def _accepted(sampled: list[int], drafts: list[int], num_drafts: list[int]) -> list[list[int]]:
    """Decode request by request: sample, and go on as long as the next draft is the sample."""
    found, row, first = [], 0, 0
    for count in num_drafts:
        tokens = [sampled[row]]
        for place in range(count):
            if tokens[-1] != drafts[first + place]:
                break
            tokens.append(sampled[row + place + 1])
        found.append(tokens)
        row, first = row + count + 1, first + count
    return found


@pytest.mark.parametrize("seed", range(20))
def test_accept_drafts_equals_decoding_one_token_at_a_time(seed: int) -> None:
    chance = random.Random(seed)
    num_drafts = [chance.randint(0, 4) for _ in range(chance.randint(1, 6))]
    sampled = [chance.randint(0, 1) for _ in range(sum(num_drafts) + len(num_drafts))]
    drafts = [chance.randint(0, 1) for _ in range(sum(num_drafts))]
    tokens, rows = accept_drafts(torch.tensor(sampled), torch.tensor(drafts), num_drafts)
    assert tokens.shape == rows.shape == (len(num_drafts), max(num_drafts) + 1)
    assert [[token for token in each if token != REJECTED] for each in tokens.tolist()] == (
        _accepted(sampled, drafts, num_drafts)
    )
    assert all(
        sampled[row] == token
        for each, places in zip(tokens.tolist(), rows.tolist(), strict=True)
        for token, row in zip(each, places, strict=True)
        if token != REJECTED
    )


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([4, 7, 3, 5, 8, 7, 3, 6, 4, 7, 3], [5, 8, 7]),  # the longer n-gram 4 7 3, not the later 7 3
        ([9, 3, 5, 8, 9, 3, 6, 9, 3], [6, 9, 3]),  # the last occurrence
        ([9, 3, 6, 9, 3], [6, 9, 3]),
        ([9, 3, 9, 3], [9, 3, 9]),  # a period of two tokens
        ([5, 5, 5], [5, 5, 5]),
        ([3, 5, 8, 3], []),  # a single token
        ([5, 5], []),
        ([4, 5], []),
        ([4], []),
    ],
)
def test_continue_ngram_repeats_what_followed_before(tokens: list[int], draft: list[int]) -> None:
    assert continue_ngram(np.array(tokens), 3).tolist() == draft


def test_continue_ngram_longer_than_the_limit_counts_as_equal() -> None:
    common = list(range(10, 10 + LONGEST))
    tokens = [1, *common, 2, 0, *common, 3, 1, *common]
    assert continue_ngram(np.array(tokens), 1).tolist() == [3]


def _searched(tokens: list[int], num_tokens: int) -> list[int]:
    """Compare every earlier n-gram with the last one, from the longest to the shortest and from last to first."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                following = tokens[start + length :]
                return [following[i % len(following)] for i in range(num_tokens)]
    return []


def test_continue_ngram_equals_search_of_all_ngrams() -> None:
    chance = random.Random(0)
    for _ in range(500):
        tokens = [chance.randint(0, 2) for _ in range(chance.randint(1, 14))]
        assert continue_ngram(np.array(tokens), 3).tolist() == _searched(tokens, 3)


def test_draft_counts_give_fractions_of_drafted_positions() -> None:
    before = DraftCounts.zero(3).with_draft(2, 1)
    counts = before.with_draft(2, 2).with_draft(1, 0) - before
    assert dict(counts.metrics()) == {
        "engine/draft_tokens": Total(3.0),
        "engine/draft_acceptance": Mean(2.0, 3.0),
        "engine/draft_acceptance_1": Mean(1.0, 2.0),
        "engine/draft_acceptance_2": Mean(1.0, 1.0),
    }


def test_draft_counts_without_drafts_have_no_fraction() -> None:
    assert dict(DraftCounts.zero(2).metrics()) == {"engine/draft_tokens": Total(0.0)}
