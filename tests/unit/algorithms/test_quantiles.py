"""Quantiles of ratios compared with numpy, and their independence of the division into parts."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from mcore_rl.algorithms import compute_policy_loss
from mcore_rl.algorithms.quantiles import LARGEST, QUANTILES, SMALLEST, STEPS, count_rounded, ratio_quantiles
from mcore_rl.types import Metric, Quantile, merge_metrics


def measured(log_ratio: torch.Tensor, selected: torch.Tensor | None = None) -> dict[str, Metric]:
    everything = torch.ones_like(log_ratio, dtype=torch.bool)
    return ratio_quantiles(count_rounded(log_ratio, everything if selected is None else selected).tolist())


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_ratio_quantiles_match_numpy_within_resolution(count: int) -> None:
    for spread, middle in product((1e-4, 1e-3, 0.05, 0.7, 6.0), (-0.3, 0.0, 2.0)):
        check_quantiles(middle + spread * np.random.default_rng(count).standard_normal(count).astype(np.float32))


def check_quantiles(log_ratio: np.ndarray) -> None:
    for name, metric in measured(torch.from_numpy(log_ratio)).items():
        true = float(np.quantile(log_ratio, QUANTILES[name], method="inverted_cdf"))
        wanted = 0.0 if abs(true) < SMALLEST else true
        assert abs(true) < LARGEST
        assert abs(math.log(metric.value) - wanted) <= abs(wanted) / (2 * STEPS) * (1 + 1e-6), name


def test_counts_of_parts_sum_to_counts_of_whole() -> None:
    log_ratio = 0.2 * torch.randn(500, generator=torch.Generator().manual_seed(0))
    whole = measured(log_ratio)
    parts = [measured(part) for part in log_ratio.split([1, 0, 249, 50, 200])]
    assert merge_metrics(parts) == whole
    assert merge_metrics(parts[::-1]) == whole


def test_count_rounded_ignores_untrained_tokens() -> None:
    log_ratio = torch.tensor([[0.5, 0.0, 0.0], [-0.5, 0.0, 0.25]])
    selected = torch.tensor([[True, False, False], [True, True, True]])
    assert measured(log_ratio, selected) == measured(torch.tensor([0.5, -0.5, 0.0, 0.25]))
    assert not torch.equal(count_rounded(log_ratio, selected), count_rounded(log_ratio, torch.ones_like(selected)))


def test_ratio_quantiles_of_equal_policies_are_one() -> None:
    noise = torch.tensor([1e-7, -1e-7, 0.0, -0.0, 2e-4, -2e-4])
    assert {metric.value for metric in measured(noise).values()} == {1.0}


def test_ratio_quantiles_are_json_numbers() -> None:
    for metric in measured(torch.tensor([0.1, -0.1], dtype=torch.float64)).values():
        assert type(metric.value) is float
        assert json.loads(json.dumps(metric.value)) == metric.value
    assert Quantile(0.5, Counter()).value == 0.0


def test_ratio_quantiles_count_tokens_or_responses() -> None:
    logp = torch.zeros(3, 50)
    logp[0], logp[1, :1] = 0.5, -0.5
    mask = torch.ones(3, 50)
    mask[1, 1:] = 0
    given = {"logp": logp, "old_logp": torch.zeros_like(logp), "advantages": torch.ones_like(logp), "mask": mask}
    # One of 101 tokens is less than 1 %, one of three responses a third.
    for name, lowest, count in (("ppo_clip", 0.0, 101), ("gspo", -0.5, 3)):
        metrics = compute_policy_loss(name, **given).metrics
        found = [math.log(metrics[quantile].value) for quantile in QUANTILES]
        assert found == pytest.approx([lowest, 0.0, 0.5], rel=1 / (2 * STEPS)), name
        counted = metrics["ratio_p50"]
        assert isinstance(counted, Quantile)
        assert sum(counted.counts.values()) == count
