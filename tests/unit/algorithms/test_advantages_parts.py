"""MaxRL and GDPO, compared with float64 loops written from the papers."""

from __future__ import annotations

from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import compute_advantages
from mcore_rl.errors import ConfigError, DataError

WEIGHTS = {"correct": 1.0, "format": -0.5, "short": 2.0}


def column(name, rewards, ids, **inputs):
    rewards = torch.tensor(rewards, dtype=torch.float64)[:, None]
    found = compute_advantages(
        name, token_rewards=rewards, mask=torch.ones_like(rewards), group_ids=torch.tensor(ids), **inputs
    )
    return found.advantages[:, 0].tolist()


def members(ids, i):
    return [j for j in range(len(ids)) if ids[j] == ids[i]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([(g, r) for g in range(3) for r in (0.0, 0.3, 1.0)]), min_size=1, max_size=20))
def test_maxrl_divides_by_the_mean_of_the_group(samples):
    ids, rewards = [g for g, _ in samples], [r for _, r in samples]
    means = [fmean([rewards[j] for j in members(ids, i)]) for i in range(len(ids))]
    expected = [(r - m) / m if m else 0.0 for r, m in zip(rewards, means, strict=True)]
    assert column("maxrl", rewards, ids) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_maxrl_is_the_truncated_gradient_of_the_log_likelihood():
    """The paper's estimator is the sum over correct responses of score / K, minus the mean of all scores: for 2 correct
    responses of 5, the coefficients are 1/2 - 1/5 and -1/5; ours are 5 times these, for a mean over responses."""
    found = column("maxrl", [1, 0, 1, 0, 0], [7] * 5)
    assert found == pytest.approx([5 * (1 / 2 - 1 / 5), -1, 5 * (1 / 2 - 1 / 5), -1, -1])


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 3e4])
def test_maxrl_with_equal_rewards_gives_exactly_zero(reward):
    assert column("maxrl", [reward] * 7 + [1, 0], [2] * 7 + [5, 5]) == [0.0] * 7 + [1, -1]


def test_maxrl_with_negative_rewards_names_the_responses():
    with pytest.raises(DataError, match=r"maxrl needs rewards of at least 0, but 2 responses .*: \[1, 3\]"):
        column("maxrl", [1, -0.5, 0, -1], [0, 0, 1, 1])


def gdpo(ids, parts):
    """The paper's equations; a response without a part has no normalized value of it, which adds nothing."""

    def normalized(values, i):
        group = [values[j] for j in members(ids, i) if not np.isnan(values[j])]
        spread = stdev(group) if len(group) > 1 else 0.0
        return 0.0 if np.isnan(values[i]) else (values[i] - fmean(group)) / (spread + 1e-6)

    sums = [sum(w * normalized(parts[name], i) for name, w in WEIGHTS.items()) for i in range(len(ids))]
    spread = stdev(sums) if len(sums) > 1 else 0.0
    return [(each - fmean(sums)) / (spread + 1e-6) for each in sums]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 24), st.sampled_from([0.0, 0.3]))
def test_gdpo_matches_the_equations_of_the_paper(seed, size, missing):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, max(1, size // 4), size)
    parts = {name: rng.choice([0.0, 0.5, 1.0], size) for name in WEIGHTS}
    parts["correct"] = rng.normal(size=size)
    parts["correct"][1:][rng.random(size - 1) < missing] = np.nan
    tensors = {name: torch.from_numpy(values) for name, values in parts.items()}
    found = column("gdpo", [0.0] * size, ids, parts=tensors, part_weights=WEIGHTS)
    assert found == pytest.approx(gdpo(ids.tolist(), parts), rel=1e-9, abs=1e-9)


def test_gdpo_weighs_a_rare_part_like_a_frequent_one():
    """The sums of the parts of b and c are equal to the sum of a, but a has the part that varies less."""
    parts = {"correct": torch.tensor([1.0, 0, 0, 0]), "format": torch.tensor([0.0, 1, 1, 0])}
    a, b, c, d = column("gdpo", [0] * 4, [1] * 4, parts=parts, part_weights={"correct": 1, "format": 1})
    assert a > b == c > d


def test_gdpo_with_groups_of_equal_parts_gives_exactly_zero():
    parts = {"format": torch.tensor([0.1] * 7 + [0.0, 1.0])}
    found = column("gdpo", [0.0] * 9, [2] * 7 + [5, 5], parts=parts, part_weights={"format": 1})
    assert found[:7] == [0.0] * 7
    assert found[7] == -found[8] < 0


@pytest.mark.parametrize("values", [{"style": torch.ones(2)}, {"format": torch.full((2,), torch.nan)}, {}])
def test_gdpo_with_an_absent_part_names_it(values):
    known = ", ".join(values) or "none"
    with pytest.raises(ConfigError, match=rf"part_weights\.format: no response of this step .* are: {known}"):
        column("gdpo", [0, 0], [1, 1], parts=values, part_weights={"format": 1})


def test_gdpo_without_weights_is_rejected():
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=gdpo needs algorithm\.part_weights"):
        column("gdpo", [0], [1], parts={})
