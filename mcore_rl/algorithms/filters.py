"""Dynamic sampling: which groups can teach anything. Source: DAPO, arXiv 2503.14476, section 3.2."""

from __future__ import annotations

import numpy as np


def groups_with_variance(values: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """True for every response of a group whose values are not all the same.

    Equal means exactly equal as floats: a group is dropped only if its advantages are exactly 0.

    Shapes: values float [B]; group_ids int64 [B], arbitrary and unsorted -> bool [B].
    """
    values, group_ids = np.asarray(values), np.asarray(group_ids)
    if values.ndim != 1 or values.shape != group_ids.shape:
        raise ValueError(f"values {values.shape} and group_ids {group_ids.shape} must both be [B]")
    _, first, group = np.unique(group_ids, return_index=True, return_inverse=True)
    differs = values != values[first][group]
    return (np.bincount(group, weights=differs, minlength=len(first)) > 0)[group]
