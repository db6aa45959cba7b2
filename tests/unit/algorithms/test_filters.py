"""Dynamic sampling's filter against a loop, and against the advantages that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import compute_advantages, groups_with_variance

GROUPED = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0.0, 0.1, 0.1 + 1e-9, -1.0])), max_size=40)


@settings(max_examples=200, deadline=None)
@given(GROUPED)
def test_keeps_exactly_the_groups_whose_values_differ(rows):
    ids, values = np.array([r[0] for r in rows], np.int64), np.array([r[1] for r in rows])
    seen: dict[int, set[float]] = {}
    for group, value in rows:
        seen.setdefault(group, set()).add(value)
    keep = groups_with_variance(values, ids)
    assert keep.dtype == bool
    assert keep.tolist() == [len(seen[group]) > 1 for group, _ in rows]


def test_dropped_groups_are_those_without_gradient():
    rng = np.random.default_rng(0)
    ids, values = rng.permutation(np.repeat(np.arange(200), 4)), rng.integers(0, 2, 800).astype(np.float32)
    advantages = compute_advantages(
        "grpo",
        token_rewards=torch.from_numpy(values)[:, None],
        mask=torch.ones(800, 1),
        group_ids=torch.from_numpy(ids),
    ).advantages[:, 0]
    keep = groups_with_variance(values, ids)
    assert 0 < keep.sum() < 800
    assert (advantages.numpy()[~keep] == 0).all()
    assert (advantages.numpy()[keep] != 0).all()


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="group_ids"):
        groups_with_variance(np.zeros(3), np.zeros(2, np.int64))
