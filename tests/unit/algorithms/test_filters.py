"""Dynamic sampling compared with a loop and with the advantages; overlong and user-defined filters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import groups_with_variance
from mcore_rl.algorithms.filters import user_filter
from mcore_rl.errors import ConfigError

GROUPED = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0.0, 0.1, 0.1 + 1e-9, -1.0])), max_size=40)


@settings(max_examples=200, deadline=None)
@given(GROUPED)
def test_groups_with_variance_keeps_groups_with_unequal_values(rows):
    ids, values = np.array([r[0] for r in rows], np.int64), np.array([r[1] for r in rows])
    seen: dict[int, set[float]] = {}
    for group, value in rows:
        seen.setdefault(group, set()).add(value)
    keep = groups_with_variance(values, ids)
    assert keep.dtype == bool
    assert keep.tolist() == [len(seen[group]) > 1 for group, _ in rows]


def test_groups_with_variance_with_unequal_shapes_raises():
    with pytest.raises(ValueError, match="group_ids"):
        groups_with_variance(np.zeros(3), np.zeros(2, np.int64))


USER = """
import numpy as np

def right_half(rewards, accuracies, group_ids, lengths, clipped):
    assert clipped.dtype == bool
    return (accuracies > 0) & (lengths < 5) & ~clipped & (group_ids != 3) & np.isfinite(rewards)

def counts(**scalars):
    return np.arange(len(scalars["rewards"]))

def short(**scalars):
    return np.ones(1, bool)

def narrow(rewards):
    return rewards > 0
"""
SCALARS = {
    "rewards": np.array([1.0, 0, 1, 1, np.nan], np.float32),
    "accuracies": np.array([1.0, 0, 1, 1, 1], np.float32),
    "group_ids": np.array([1, 1, 2, 3, 2]),
    "lengths": np.array([2, 2, 9, 1, 1]),
    "clipped": np.array([0, 0, 0, 0, 0], np.uint8),
}


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


def test_user_filter_receives_every_scalar(user_file):
    keep = user_filter("algorithm.filter", f"{user_file}:right_half")
    assert keep(**SCALARS).tolist() == [True, False, False, False, False]
    assert keep(**{**SCALARS, "clipped": np.ones(5, np.uint8)}).tolist() == [False] * 5


def test_user_filter_mistakes_name_key_and_function(user_file):
    for function, message in [
        ("counts", r"algorithm\.filter=.*:counts returned int64 \[5\]; it must be bool \[5\]"),
        ("short", r"bool \[1\]; it must be bool \[5\]"),
        ("narrow", r"cannot be called as f\(rewards=, accuracies=, group_ids=, lengths=, clipped=\)"),
        ("absent", "has no function absent"),
    ]:
        with pytest.raises(ConfigError, match=message):
            user_filter("algorithm.filter", f"{user_file}:{function}")(**SCALARS)
