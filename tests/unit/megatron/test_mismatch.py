"""Mismatch metrics between engine and trainer do not depend on the division into micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.megatron.step.mismatch import logp_gap, mismatch
from mcore_rl.types import merge_metrics


def measured(cuts: list[int]) -> dict[str, float]:
    generator = np.random.default_rng(0)
    ours = generator.normal(-1, 0.7, 50).astype(np.float32)
    theirs = (ours + generator.normal(0, 0.2, 50)).astype(np.float32)
    staleness = generator.integers(1, 4, 50).astype(np.float32)
    parts: list[Any] = []
    for rows in np.split(np.arange(50), cuts):
        ages = torch.from_numpy(staleness[rows])
        batch: Any = SimpleNamespace(logp_rollout=torch.from_numpy(theirs[rows]), staleness=ages, kept=None)
        parts.append(mismatch(batch, torch.from_numpy(ours[rows])))
    found = {name: metric.value for name, metric in merge_metrics(parts).items()}
    difference = np.abs(ours.astype(float) - theirs)
    assert found["rollout/logp_diff_mean"] == pytest.approx(difference.mean(), rel=1e-6)
    assert found["rollout/logp_diff_max"] == pytest.approx(difference.max(), rel=1e-6)
    fresh = difference[staleness == 1]  # 1: sampled with the weights from which the updates start
    assert found["rollout/logp_diff_fresh_mean"] == pytest.approx(fresh.mean(), rel=1e-6)
    gap = theirs.astype(float) - ours  # over tokens sampled by the engine
    assert found["rollout/kl"] == pytest.approx(gap.mean(), rel=1e-9)
    assert found["rollout/kl_low_var"] == pytest.approx((np.exp(-gap) - 1 + gap).mean(), rel=1e-9)
    weight = np.exp(-gap)
    assert found["rollout/kl_reverse"] == pytest.approx((weight * -gap).mean(), rel=1e-9)
    assert found["rollout/kl_reverse_low_var"] == pytest.approx((weight * -gap - weight + 1).mean(), rel=1e-9)
    assert found["rollout/logp_pearson"] == pytest.approx(np.corrcoef(ours, theirs)[0, 1], rel=1e-9)
    return found


def test_mismatch_differences_leave_out_tokens_alone_in_their_set() -> None:
    engine, trainer = torch.tensor([0.0, -1.0, 0.0, -2.0]), torch.tensor([0.0, -1.5, 0.0, -2.25])
    staleness = torch.tensor([1.0, 1.0, 1.0, 2.0])
    sets: Any = SimpleNamespace(num_ids=10)
    for kept, mean, fresh in ((sets, 0.375, 0.5), (None, 0.1875, 0.5 / 3)):
        batch: Any = SimpleNamespace(logp_rollout=engine, staleness=staleness, kept=kept)
        found = {name: metric.value for name, metric in merge_metrics([mismatch(batch, trainer)]).items()}
        assert found["rollout/logp_diff_mean"] == pytest.approx(mean)
        assert found["rollout/logp_diff_fresh_mean"] == pytest.approx(fresh)
        assert found["rollout/kl"] == pytest.approx(0.1875)  # over all tokens


def test_mismatch_estimates_are_unbiased_in_both_directions() -> None:
    """Weigh every token of a vocabulary by its probability in the engine: the sums are the exact divergences."""
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    trainer, engine = logits.log_softmax(-1)
    exact = {
        "rollout/kl": (engine.exp() * (engine - trainer)).sum().item(),
        "rollout/kl_reverse": (trainer.exp() * (trainer - engine)).sum().item(),
    }
    sums = dict.fromkeys([name + kind for name in exact for kind in ("", "_low_var")], 0.0)
    for ours, theirs in zip(trainer, engine, strict=True):
        batch: Any = SimpleNamespace(logp_rollout=theirs[None], staleness=torch.ones(1), kept=None)
        metrics = mismatch(batch, ours[None])
        for name in sums:
            sums[name] += metrics[name].value * theirs.exp().item()
    for name, value in sums.items():
        assert value == pytest.approx(exact[name.removesuffix("_low_var")], rel=1e-12), name


@pytest.mark.parametrize("cuts", [[], [20], [0, 3, 3, 49]], ids=["whole", "two", "with empty ones"])
def test_mismatch_metrics_merge_over_micro_batches(cuts: list[int]) -> None:
    assert measured(cuts) == pytest.approx(measured([]), rel=1e-9)


def test_logp_gap_leaves_out_tokens_of_which_the_engine_was_certain() -> None:
    """Most tokens of a truncated distribution can be certain; they must not hide a wrong model in the median."""
    batch: Any = SimpleNamespace(logp_rollout=torch.tensor([0.0, 0.0, -1.0, 0.0, -2.0, 0.0]))
    gap = logp_gap([(batch, torch.tensor([0.0, 0.0, -1.5, 0.0, -2.5, 0.0]))], own_routing=True)
    assert gap == logp_gap([(only(batch, [2, 4]), torch.tensor([-1.5, -2.5]))], own_routing=True)
    assert gap.typical == pytest.approx(0.5)


def only(batch: Any, rows: list[int]) -> Any:
    return SimpleNamespace(logp_rollout=batch.logp_rollout[rows])


def test_mismatch_without_tokens_is_zero() -> None:
    batch: Any = SimpleNamespace(logp_rollout=torch.empty(0), staleness=torch.empty(0), kept=None)
    assert {metric.value for metric in mismatch(batch, torch.empty(0)).values()} == {0.0}
