import numpy as np
import pytest

from mcore_rl.data.batching import UpdateSchedule, build_batch, gather, rank_balance
from mcore_rl.data.packing import SequenceCost
from mcore_rl.errors import ConfigError
from mcore_rl.types import RolloutScalars


def scalars_of(group_ids, seed=0):
    rng = np.random.default_rng(seed)
    count = len(group_ids)
    response = rng.integers(1, 200, count).astype(np.int32)
    return RolloutScalars(
        group_ids=np.asarray(group_ids, np.int64),
        prompt_rows=np.arange(count),
        total_tokens=response + 10,
        response_tokens=response,
        trained_tokens=response,
        rewards=rng.random(count).astype(np.float32),
        accuracies=np.zeros(count, np.float32),
        clipped=np.zeros(count, np.uint8),
        versions=np.ones((count, 2), np.int32),
    )


def token_mean(trained_tokens, group_ids):
    return np.full(len(trained_tokens), 1 / trained_tokens.sum(), np.float32)


SCALARS = [scalars_of(np.repeat([7, 3, 9, 1], 4), 1), scalars_of(np.repeat([20, 2, 40], 4), 2)]
KEEP = [np.r_[0:4, 8:16], np.r_[0:12]]  # group 3 is dropped


def batch_of(version=0, **cut):
    kept = gather(SCALARS, KEEP)
    options = {"prompts_per_update": 2, "num_dp_ranks": 3, **cut}
    return build_batch(
        ["chunk a", "chunk b"],
        kept,
        advantages=np.arange(len(kept), dtype=np.float32),
        weights_of=token_mean,
        schedule=UpdateSchedule(**options),
        version=version,
    )


def test_build_batch_updates_contain_whole_groups_in_order():
    batch = batch_of()
    assert [np.unique(batch.group_ids[u]).tolist() for u in batch.updates] == [[7, 9], [1, 20], [2, 40]]
    assert np.array_equal(np.concatenate(batch.updates), np.arange(24))


def shares_of(batch, update, num_dp_ranks, places=None):
    """Return the samples of each data-parallel rank in an update."""
    shares = batch.shares(num_dp_ranks, batch.rows if places is None else places)
    return [of_rank.by_update()[update] for of_rank in shares]


def test_build_batch_samples_reference_their_rollouts():
    batch = batch_of()
    for name in ("group_ids", "total_tokens", "trained_tokens", "rewards"):
        expected = [getattr(SCALARS[c], name)[r] for c, r in zip(batch.chunk_ids, batch.rows, strict=True)]
        assert getattr(batch, name).tolist() == expected


def test_build_batch_accepts_arbitrary_group_ids():
    kept = gather([scalars_of([5, 2, 5, 2, 8, 4, 8, 4])])
    batch = build_batch(["a"], kept, weights_of=token_mean, schedule=UpdateSchedule(prompts_per_update=1))
    assert [u.tolist() for u in batch.updates] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_batch_rank_shares_partition_each_update():
    batch = batch_of(version=7)
    for update, samples in enumerate(batch.updates):
        shares = shares_of(batch, update, 3, batch.rows + 1)
        assert np.array_equal(np.sort(np.concatenate([s.samples for s in shares])), samples)
        loads = [s.total_tokens.sum() for s in shares]
        assert max(loads) - min(loads) <= batch.total_tokens.max()
        for share in shares:
            assert share.version == 7
            assert np.array_equal(share.advantages, share.samples.astype(np.float32))
            assert np.array_equal(share.rows, batch.rows[share.samples] + 1)
            assert np.array_equal(share.origins.T, [batch.chunk_ids[share.samples], batch.rows[share.samples]])


@pytest.mark.parametrize("num_dp_ranks", [1, 2, 5])
def test_loss_weights_sum_over_ranks_is_token_mean(num_dp_ranks):
    batch = batch_of(num_dp_ranks=num_dp_ranks)
    rng = np.random.default_rng(0)
    losses = [rng.standard_normal(count) for count in batch.trained_tokens]
    for update, samples in enumerate(batch.updates):
        total = sum(
            (losses[sample] * float(weight)).sum()
            for share in shares_of(batch, update, num_dp_ranks)
            for sample, weight in zip(share.samples, share.loss_weights, strict=True)
        )
        assert total == pytest.approx(np.concatenate([losses[s] for s in samples]).mean(), abs=1e-7)


def test_build_batch_balances_cost_of_schedule():
    cost = SequenceCost(per_token=1.0, per_pair=0.1)
    batch = batch_of(cost=cost)
    costs = cost.of(batch.total_tokens)
    ratios = []
    for update in range(3):
        shares = shares_of(batch, update, 3)
        loads = [costs[share.samples].sum() for share in shares]
        assert max(loads) - min(loads) <= costs.max()
        ratios.append(np.mean(loads) / max(loads))
    assert rank_balance(batch, cost, 3).value == pytest.approx(np.mean(ratios))
    by_tokens = rank_balance(batch_of(), cost, 3).value
    assert by_tokens < np.mean(ratios) <= 1


def test_build_batch_epochs_reorder_updates_reproducibly():
    batch = batch_of(prompts_per_update=1, update_epochs=3, seed=(1, 5))
    once = batch_of(prompts_per_update=1)
    assert np.array_equal(once.dp_ranks, batch.dp_ranks)
    assert np.array_equal(once.loss_weights, batch.loss_weights)
    epochs = [batch.updates[i : i + 6] for i in (0, 6, 12)]
    first = [u.tolist() for u in epochs[0]]
    for epoch in epochs[1:]:
        assert sorted(u.tolist() for u in epoch) == first
        assert [u.tolist() for u in epoch] != first
    again = batch_of(prompts_per_update=1, update_epochs=3, seed=(1, 5))
    other = batch_of(prompts_per_update=1, update_epochs=3, seed=(1, 6))
    assert [u.tolist() for u in again.updates] == [u.tolist() for u in batch.updates]
    assert [u.tolist() for u in other.updates] != [u.tolist() for u in batch.updates]


def test_build_batch_indivisible_updates_are_rejected():
    with pytest.raises(ConfigError, match=r"trainer\.prompts_per_update=4 does not divide the 6 groups"):
        batch_of(prompts_per_update=4)


def test_build_batch_empty_step_is_rejected():
    none = gather(SCALARS[:1], [np.empty(0, np.int64)])
    with pytest.raises(ConfigError, match="kept no response"):
        build_batch(["a"], none, weights_of=token_mean, schedule=UpdateSchedule(prompts_per_update=1))


def test_batch_shares_number_groups_equally_on_all_ranks():
    batch = batch_of()
    numbers = {}
    for update in range(len(batch.updates)):
        for share in shares_of(batch, update, 3):
            for sample, number in zip(share.samples.tolist(), share.groups.tolist(), strict=True):
                numbers.setdefault(int(batch.group_ids[sample]), set()).add(number)
    assert sorted(numbers.values(), key=min) == [{number} for number in range(6)]
