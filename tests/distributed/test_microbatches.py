"""Packed micro-batches compared token by token with the trajectories they are built from."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from mcore_rl.errors import DataError, McoreRLError
from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.step.microbatches import MicroBatch, Packing, build_microbatches
from mcore_rl.types import RankShare
from tests.distributed import policy_batch
from tests.distributed.launch import launch

SAMPLES = list(range(len(policy_batch.PROMPTS)))


def _computed(sample: int) -> int:
    """Tokens up to the last predictor; later tokens have no effect."""
    return policy_batch.PROMPTS[sample] + int(np.flatnonzero(policy_batch.trained(sample))[-1])


LENGTHS = [_computed(sample) for sample in SAMPLES]


def _build(packing: Packing, samples: list[int] = SAMPLES) -> list[MicroBatch]:
    return build_microbatches(policy_batch.share(samples, 0, 1), policy_batch.chunks(), packing)


def _bounds(batch: MicroBatch) -> list[int]:
    return batch.sequences.cu_seqlens_q.tolist()


@pytest.mark.parametrize("tokens", [16, 20, 45, 10_000])
def test_microbatches_predict_every_trained_token_once(tokens: int) -> None:
    share = policy_batch.share(SAMPLES, 0, 1)
    found: dict[int, list[tuple[int, int, float, float, float, float]]] = {}
    for batch in _build(Packing(tokens=tokens)):
        counts = np.repeat(batch.samples, batch.trained_counts)
        bounds = _bounds(batch)
        for i, sample in enumerate(counts.tolist()):
            position = int(batch.predictors[i]) - bounds[batch.samples.index(sample)]
            values = (batch.logp_rollout[i], batch.advantages[i], batch.loss_weights[i], batch.staleness[i])
            found.setdefault(sample, []).append((position, int(batch.targets[i]), *map(float, values)))
    for index, sample in enumerate(SAMPLES):
        prompt, tokens_of = policy_batch.PROMPTS[sample], policy_batch.sequence(sample)
        rollout, versions = policy_batch.logp_rollout(sample), policy_batch.versions(sample)
        expected = [
            (
                prompt + t - 1,
                int(tokens_of[prompt + t]),
                float(rollout[t]),
                float(share.advantages[index]),
                float(share.loss_weights[index]),
                float(policy_batch.VERSION + 1 - versions[t]),
            )
            for t in range(policy_batch.RESPONSES[sample])
            if policy_batch.trained(sample)[t]
        ]
        assert found[sample] == expected


def test_microbatch_lists_observations_of_responses() -> None:
    """Tokens that were not sampled, before the last trained one; a sampled token that is not trained is none. The mean
    over a response has the weight that the driver gave it, not the weight of its loss."""
    share, buffers = policy_batch.share([0, 2, 4, 6], 0, 1), policy_batch.chunks()
    of_response = {0: 0.25, 2: 0.75, 4: 0.0, 6: 0.5}
    share = replace(share, observation_weights=np.array([of_response[s] for s in share.samples.tolist()], np.float32))
    buffers[0].trained[1] = 0  # a token of sample 0
    [batch] = build_microbatches(share, buffers, Packing(tokens=10_000, observed=True))
    expected, starts = {}, dict(zip(batch.samples, _bounds(batch), strict=False))
    for sample in batch.samples:
        trained = np.flatnonzero(policy_batch.trained(sample))
        places = policy_batch.PROMPTS[sample] + np.setdiff1d(np.arange(trained[-1]), trained)
        weight = of_response[sample] / max(len(places), 1)
        tokens = policy_batch.sequence(sample)
        expected |= {starts[sample] + int(place) - 1: (int(tokens[place]), weight) for place in places}
    observed = batch.observations
    assert observed is not None
    found = zip(observed.targets.tolist(), observed.weights.tolist(), strict=True)
    assert dict(zip(observed.predictors.tolist(), found, strict=True)) == {
        place: (token, pytest.approx(weight)) for place, (token, weight) in expected.items()
    }
    assert len({weight for _, weight in expected.values()}) > 1


def test_microbatches_with_tokens_of_newer_weights_raise() -> None:
    share = replace(policy_batch.share([3, 5], 0, 1), version=policy_batch.VERSION - 1)
    with pytest.raises(McoreRLError, match="sample 5 has tokens of version 5, newer than version 4 of its batch"):
        build_microbatches(share, policy_batch.chunks(), Packing(tokens=45))


@pytest.mark.parametrize("tokens", [16, 20, 45, 10_000])
def test_microbatch_rows_are_whole_sequences_within_the_budget(tokens: int) -> None:
    for batch in _build(Packing(tokens=tokens)):
        bounds = _bounds(batch)
        assert bounds[-1] == len(batch.tokens) == sum(LENGTHS[sample] for sample in batch.samples)
        assert len(batch.tokens) <= tokens
        for sample, (first, end) in zip(batch.samples, pairwise(bounds), strict=True):
            assert batch.tokens[first:end].tolist() == policy_batch.sequence(sample)[: _computed(sample)].tolist()


def test_microbatch_row_is_padded_by_a_separate_sequence() -> None:
    for batch in _build(Packing(tokens=20, row_multiple=4)):
        real = sum(LENGTHS[sample] for sample in batch.samples)
        assert len(batch.tokens) == -(-real // 4) * 4
        assert real in _bounds(batch)
        assert (batch.predictors < real).all()


def test_microbatches_of_interleaved_pipeline_include_dummies() -> None:
    batches = _build(Packing(tokens=10_000, row_multiple=2, count_multiple=4), [3, 5])
    assert len(batches) == 4
    assert sorted(sample for batch in batches for sample in batch.samples) == [3, 5]
    dummies = [batch for batch in batches if not batch.samples]
    assert [len(batch.tokens) for batch in dummies] == [2, 2]
    assert not any(len(batch.targets) for batch in dummies)


def test_microbatches_without_samples_are_dummies() -> None:
    empty = RankShare(*(np.empty(0, kind) for kind in ("i8", "i4", "i4", "i4", "i4", "f4", "f4", "f4")))
    batches = build_microbatches(empty, policy_batch.chunks(), Packing(tokens=20))
    assert [len(batch.tokens) for batch in batches] == [1]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("row_multiple", [1, 2, 3])
def test_microbatches_of_context_ranks_cover_every_row_once(size: int, row_multiple: int) -> None:
    whole = _build(Packing(tokens=24))
    ranks = [_build(Packing(24, row_multiple, context=ContextPart(rank, size))) for rank in range(size)]
    for parts in zip(*ranks, strict=True):
        first = parts[0]
        lengths = first.sequences.cu_seqlens_q.diff()
        assert torch.equal(first.sequences.cu_seqlens_q_padded, first.sequences.cu_seqlens_q)
        assert (lengths % (2 * size) == 0).all()
        assert len({len(part.tokens) for part in parts}) == 1
        assert len(first.tokens) % row_multiple == 0
        # Restore the order of the row: chunk c of a sequence is on rank c or, mirrored, on rank 2 * size - 1 - c.
        held = [part.tokens.split((lengths // size).tolist()) for part in parts]
        bounds = _bounds(first)
        for index, sample in enumerate(first.samples):
            halves = [rank[index].chunk(2) for rank in held]
            row = torch.cat([pair[0] for pair in halves] + [pair[1] for pair in reversed(halves)])
            tokens = policy_batch.sequence(sample)[: _computed(sample)]
            assert row.tolist() == [*tokens.tolist(), *[0] * (bounds[index + 1] - bounds[index] - len(tokens))]
    ours = _by_token([batch for rank in ranks for batch in rank])
    assert ours == _by_token(whole)
    assert len(ours) == sum(len(batch.targets) for rank in ranks for batch in rank)


def _by_token(batches: list[MicroBatch]) -> dict[tuple[int, float], tuple[float, ...]]:
    """Data of every trained token by its sample and its (unique) log-probability."""
    found = {}
    for batch in batches:
        samples = np.repeat(batch.samples, batch.trained_counts).tolist()
        columns = (batch.tokens[batch.predictors], batch.targets, batch.advantages, batch.loss_weights)
        for sample, logp, *values in zip(
            samples, batch.logp_rollout.tolist(), *(column.tolist() for column in columns), strict=True
        ):
            found[sample, logp] = tuple(values)
    return found


def test_microbatches_of_context_ranks_know_owners_of_all_tokens() -> None:
    ranks = [_build(Packing(48, context=ContextPart(rank, 2))) for rank in range(2)]
    for parts in zip(*ranks, strict=True):
        assert torch.equal(parts[0].owners, parts[1].owners)
        assert parts[0].whole_counts == parts[1].whole_counts
        for sample, count in zip(parts[0].samples, parts[0].whole_counts, strict=True):
            assert count == policy_batch.trained(sample).sum()
        for rank, part in enumerate(parts):
            assert len(part.targets) == (part.owners == rank).sum() == sum(part.trained_counts)
            joined = torch.empty(len(part.owners))
            for other, peer in enumerate(parts):
                joined[peer.owners == other] = peer.logp_rollout
            in_order = [policy_batch.logp_rollout(s)[policy_batch.trained(s) > 0] for s in part.samples]
            assert np.array_equal(joined.numpy(), np.concatenate(in_order))


def test_microbatches_with_too_long_sequence_raise() -> None:
    with pytest.raises(DataError, match=r"has 16 tokens.*actor\.tokens_per_microbatch"):
        _build(Packing(tokens=15))


def test_microbatches_without_prompt_raise() -> None:
    first, second = policy_batch.chunks()
    first.prompt_tokens[2] = 0
    with pytest.raises(DataError, match="sample 2 has an empty prompt"):
        build_microbatches(policy_batch.share([2], 0, 1), [first, second], Packing(tokens=20))


def test_microbatches_are_equally_many_on_data_parallel_ranks() -> None:
    counts = launch(_count, 2)
    assert counts[0] == counts[1]
    assert counts[0] >= sum(LENGTHS) / 20


def _count(rank: int) -> int:
    packing = Packing(tokens=20, group=torch.distributed.group.WORLD)
    share = policy_batch.share(SAMPLES, rank, 2)  # eight samples on the first rank, one on the second
    batches = build_microbatches(share, policy_batch.chunks(), packing)
    assert all(len(batch.tokens) for batch in batches)
    return len(batches)
