"""Selection of tokens among a whole update: exact over ranks, and independent of the division into micro-batches."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st

from mcore_rl.algorithms import PolicyLossInputs, policy_loss
from mcore_rl.algorithms.selection import _mix, choose, highest, mean_bound, random_scores, threshold, token_keys
from tests.unit.algorithms import loss_oracles

FLOATS = st.floats(width=32, allow_nan=False)


@settings(max_examples=100, deadline=None)
@given_by(st.lists(FLOATS | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=12), st.integers(1, 12))
def test_threshold_equals_kth_largest_score(values, count):
    scores = torch.tensor(values, dtype=torch.float32)
    finite = sorted((x for x in scores.tolist() if x > -torch.inf), reverse=True)
    expected = {x for x in finite if x >= (finite[count - 1] if count <= len(finite) else -torch.inf)}
    limit = threshold(scores, count)
    assert set(scores[scores >= limit].tolist()) == expected


@pytest.mark.parametrize("start", [1.0, -1.0, -3e38, 3e38, -1e-44])
def test_threshold_distinguishes_adjacent_floats(start):
    scores = [torch.tensor(start)]
    for _ in range(63):
        scores.append(torch.nextafter(scores[-1], torch.tensor(torch.inf)))
    ascending = torch.stack(scores)
    for count in (1, 2, 17, 32, 63, 64):
        assert threshold(ascending, count) == ascending[-count]


@settings(max_examples=50, deadline=None)
@given_by(st.lists(FLOATS, min_size=0, max_size=20), st.integers(0, 20), st.integers(0, 20))
def test_threshold_on_ranks_equals_threshold_of_all_scores(values, cut, count):
    scores = torch.tensor(values, dtype=torch.float32)
    parts = [scores[:cut], scores[cut:]]
    limits = on_ranks(2, lambda rank, all_reduce: threshold(parts[rank], count, all_reduce))
    assert limits[0] == limits[1] == threshold(scores, count)


@settings(max_examples=50, deadline=None)
@given_by(st.lists(FLOATS | st.just(-math.inf), max_size=20), st.integers(0, 20), st.floats(0.01, 1.0))
def test_highest_on_ranks_equals_highest_of_all_scores(values, cut, share):
    parts = [torch.tensor(values[:cut], dtype=torch.float32), torch.tensor(values[cut:], dtype=torch.float32)]
    found = on_ranks(2, lambda rank, all_reduce: highest([parts[rank], torch.empty(0)], share, all_reduce))
    eligible = sum(value > -math.inf for value in values)
    number = min(eligible, max(1, int(share * eligible)))
    limit = sorted(values, reverse=True)[number - 1] if number else math.inf
    for part, (flags, _) in zip(parts, found, strict=True):
        assert flags.tolist() == [value >= limit for value in part.tolist()]


def test_highest_share_of_distinct_scores_is_exact():
    scores = torch.randperm(1000).float()
    (flags,) = highest([scores], 0.2)
    assert flags.tolist() == (scores >= 800).tolist()


@settings(max_examples=100, deadline=None)
@given_by(st.lists(st.floats(0, 4, width=32) | st.sampled_from([0.0, 0.25]), max_size=12), st.integers(0, 12))
def test_mean_bound_on_ranks_keeps_most_values_within_the_bound(values, cut):
    bound = 0.3
    parts = [torch.tensor(values[:cut], dtype=torch.float32), torch.tensor(values[cut:], dtype=torch.float32)]
    limits = on_ranks(2, lambda rank, all_reduce: mean_bound(parts[rank], bound, all_reduce))
    kept = sorted(values)
    while kept and sum(kept) / len(kept) > bound:  # drop the largest, with all that equal it
        kept = [value for value in kept if value < kept[-1]]
    for part, limit in zip(parts, limits, strict=True):
        assert [value for value in part.tolist() if value <= limit] == [
            value for value in part.tolist() if value in kept
        ]


def test_choose_without_eligible_tokens_chooses_nothing():
    scores = torch.full((4,), -torch.inf)
    assert not (scores >= threshold(scores, 2)).any()
    assert not (torch.tensor([1.0, 3e38]) >= threshold(torch.tensor([1.0, 3e38]), 0)).any()


def test_random_scores_match_splitmix64():
    """First outputs of the published generator for the seeds 0 and 1."""
    outputs = _mix(torch.tensor([0, 1])).tolist()
    assert [x % 2**64 for x in outputs] == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    scores = random_scores(torch.arange(200_000))
    assert scores.isfinite().all()
    assert (scores > 0).all()
    assert len(scores.unique()) > 199_980


def test_random_scores_are_unbiased_over_tokens():
    """The best 2 of 8 tokens over 4000 seeds: each about 1000 times (standard deviation 27)."""
    samples, positions = torch.arange(2).repeat_interleave(4), torch.arange(4).repeat(2)
    chosen: Counter[int] = Counter()
    for seed in range(4000):
        chosen.update(random_scores(token_keys(samples, positions, seed)).topk(2).indices.tolist())
    assert all(abs(chosen[token] - 1000) < 135 for token in range(8))


def test_token_keys_do_not_depend_on_packing():
    samples, positions = torch.tensor([7, 7, 3]), torch.tensor([0, 1, 0])
    keys = token_keys(samples, positions, seed=5)
    assert len(set(keys.tolist())) == 3
    assert torch.equal(token_keys(samples.flip(0), positions.flip(0), seed=5), keys.flip(0))
    assert not torch.equal(token_keys(samples, positions, seed=6), keys)


def update(tokens=300, seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(tokens, generator=g) * 4
    samples = torch.arange(tokens) // 10
    keys = token_keys(samples, torch.arange(tokens) % 10, seed=11)
    inputs = PolicyLossInputs(
        logp=old + 0.3 * torch.randn(tokens, generator=g),
        mask=(torch.rand(tokens, generator=g) < 0.9).float(),
        old_logp=old,
        advantages=torch.randn(tokens, generator=g),
    )
    return inputs, keys


def part(inputs, index):
    return PolicyLossInputs(**{key: None if t is None else t[index] for key, t in vars(inputs).items()})


LOSSES = [("clip_cov", {"cov_ratio": 0.05, "cov_low": 0.1}), ("kl_cov", {"cov_ratio": 0.05})]


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_selective_loss_gradients_do_not_depend_on_layout(name, options):
    loss = policy_loss(name, **options)
    inputs, keys = update()
    of_all = choose(loss, [inputs], [keys])[0]
    one_by_one = choose(loss, [part(inputs, slice(t, t + 1)) for t in range(300)], list(keys.split(1)))
    assert torch.equal(torch.cat(one_by_one), of_all)
    whole = gradient(loss, inputs, of_all)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    ranks = [[order[:40], order[40:40], order[40:130]], [order[130:131], order[131:]]]

    def on_rank(rank, all_reduce):
        parts = [part(inputs, index) for index in ranks[rank]]
        chosen = choose(loss, parts, [keys[index] for index in ranks[rank]], all_reduce)
        return [gradient(loss, piece, flags) for piece, flags in zip(parts, chosen, strict=True)]

    cut = torch.zeros_like(whole)
    for rank, gradients in enumerate(on_ranks(2, on_rank)):
        for index, piece in zip(ranks[rank], gradients, strict=True):
            cut[index] = piece
    assert torch.equal(cut, whole)
    alone = torch.cat(
        [gradient(loss, piece, None) for piece in (part(inputs, slice(150)), part(inputs, slice(150, 300)))]
    )
    assert not torch.equal(alone, whole)  # a single micro-batch would choose other tokens


def test_clip_cov_chooses_randomly_among_eligible_tokens():
    loss = policy_loss("clip_cov", cov_ratio=0.05, cov_low=0.1, clip_low=0.1, clip_high=0.3)
    inputs, _ = update()
    lists = {key: [tensor.tolist()] for key, tensor in vars(inputs).items() if tensor is not None}
    eligible = loss_oracles.clip_cov_eligible([list(inputs.logp)], lists, lists["mask"], 0.1, 0.3, 0.1, 5.0)
    eligible = {t for _, t in eligible}
    number = int(0.05 * inputs.mask.sum())
    assert len(eligible) > 2 * number
    seen: set[int] = set()
    for seed in range(40):
        keys = token_keys(torch.zeros(300, dtype=torch.int64), torch.arange(300), seed)
        picked = choose(loss, [inputs], [keys])[0].nonzero().flatten().tolist()
        assert len(picked) == number
        assert set(picked) <= eligible
        seen.update(picked)
    assert seen == eligible


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_selective_loss_chooses_between_one_and_all_tokens(name, options):
    loss = policy_loss(name, **options)
    assert [loss.count(n) for n in (0, 1, 19, 20, 59, 60)] == [0, 1, 1, 1, 2, 3]
    assert policy_loss(name, cov_ratio=1.0).count(7) == 7


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_choose_ignores_tokens_outside_mask(name, options):
    loss = policy_loss(name, **options)
    inputs, keys = update()
    outside = inputs.mask == 0
    junk = replace(
        inputs,
        logp=inputs.logp.masked_fill(outside, torch.nan),
        advantages=inputs.advantages.masked_fill(outside, torch.inf),
        old_logp=inputs.old_logp.masked_fill(outside, -torch.inf),
    )
    chosen = choose(loss, [junk], [keys])[0]
    assert torch.equal(chosen, choose(loss, [inputs], [keys])[0])
    assert not chosen[outside].any()
    everything = replace(junk, chosen=torch.ones_like(outside))
    assert loss(everything).loss[outside].eq(0).all()


def gradient(loss, inputs, chosen):
    logp = inputs.logp.clone().requires_grad_()
    loss(replace(inputs, logp=logp, chosen=chosen)).loss.sum().backward()
    return logp.grad


def on_ranks(size, call):
    """Run call(rank, all_reduce) on `ranks` threads that synchronize in every sum; results in the order of ranks."""
    barrier, slots, results = threading.Barrier(size, timeout=30), [None] * size, [None] * size

    def run(rank):
        def all_reduce(tensor):
            slots[rank] = tensor
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        try:
            results[rank] = call(rank, all_reduce)
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
