"""Filters that select the responses to train on: pure functions of per-response scalars.

Shapes: every array [B], results bool [B] (True: keep).
Source: DAPO, arXiv 2503.14476, dynamic sampling (section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mcore_rl.config.functions import check_call, load_function
from mcore_rl.errors import ConfigError

ARGUMENTS = ("rewards", "accuracies", "group_ids", "lengths", "clipped")
FORM = f"f({', '.join(f'{name}=' for name in ARGUMENTS)}) -> bool [B]"


def groups_with_variance(values: np.ndarray, group_ids: np.ndarray, roles: np.ndarray | None = None) -> np.ndarray:
    """Keep the responses of groups whose values are not all equal. With `roles`, values are compared within each role
    of a group, and a group is kept if they differ in one of them.

    Values are compared exactly as floats: a group is dropped only if its advantages are exactly 0.

    Shapes: values float [B]; group_ids int64 [B], arbitrary and unsorted; roles text [B] -> bool [B].
    """
    values, group_ids = np.asarray(values), np.asarray(group_ids)
    if values.ndim != 1 or values.shape != group_ids.shape:
        raise ValueError(f"values {values.shape} and group_ids {group_ids.shape} must both be [B]")
    _, group = np.unique(group_ids, return_inverse=True)
    compared = group
    if roles is not None:
        names, role = np.unique(roles, return_inverse=True)
        compared = group * len(names) + role
    # `cell` numbers the responses that are compared; `first` is the first response of each cell.
    _, first, cell = np.unique(compared, return_index=True, return_inverse=True)
    # Compare with the first value of the cell: a variance of equal floats can differ from 0 by rounding.
    differs = values != values[first][cell]
    return (np.bincount(group, weights=differs) > 0)[group]


def user_filter(key: str, spec: str) -> Callable[..., np.ndarray]:
    """Load the filter `key=module_or_file.py:function` and check its results on every call.

    The function receives rewards, accuracies: float; group_ids: int64, arbitrary and unsorted; lengths: int, response
    tokens; clipped: bool, True if the response reached its token limit.

    Raises: ConfigError that names `key` if the function cannot be loaded or does not take ARGUMENTS; each call raises
    it if the result is not bool [B].
    """
    setting, function = f"{key}={spec}", load_function(key, spec)
    check_call(setting, function, ARGUMENTS, {}, FORM)

    def keep(*, clipped: np.ndarray, **scalars: np.ndarray) -> np.ndarray:
        # RolloutScalars hold 0 and 1, but the function is promised flags.
        result = np.asarray(function(**scalars, clipped=np.asarray(clipped).astype(bool)))
        # numpy would take integers as indices instead of flags.
        if result.dtype != np.bool_ or result.shape != clipped.shape:
            raise ConfigError(
                f"{setting} returned {result.dtype} {list(result.shape)}; it must be bool {list(clipped.shape)}, "
                "True for each response to keep"
            )
        return result

    return keep
