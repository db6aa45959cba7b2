"""Which responses are trained: pure functions of a rollout call's scalars that return what to keep.

Shapes: every array [B], results bool [B], True: keep.
Source: DAPO, arXiv 2503.14476, dynamic sampling (section 3.2) and overlong filtering (section 3.4).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mcore_rl.config.functions import check_call, load_function
from mcore_rl.errors import ConfigError

GIVEN = ("rewards", "accuracies", "group_ids", "lengths", "clipped")
FORM = f"f({', '.join(f'{name}=' for name in GIVEN)}) -> bool [B]"


class ResponseFilter(Protocol):
    """rewards, accuracies float; group_ids int64, arbitrary and unsorted; lengths int, response tokens; clipped bool,
    True where the response hit its token limit."""

    def __call__(
        self,
        *,
        rewards: np.ndarray,
        accuracies: np.ndarray,
        group_ids: np.ndarray,
        lengths: np.ndarray,
        clipped: np.ndarray,
    ) -> np.ndarray: ...


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


def finished(clipped: np.ndarray) -> np.ndarray:
    """Overlong filtering: True for responses that ended by themselves. One that hit its token limit was cut before its
    answer, so its reward says nothing about the tokens that it has; it still counts in its group's baseline.

    Shapes: clipped bool or 0/1 [B] -> bool [B].
    """
    clipped = np.asarray(clipped)
    if clipped.ndim != 1:
        raise ValueError(f"clipped {clipped.shape} must be [B]")
    return clipped == 0


def user_filter(key: str, spec: str) -> ResponseFilter:
    """The filter that `key=module_or_file.py:function` names, with its answers checked.

    Raises: ConfigError naming `key`, here for a function that cannot be loaded or called so, and later for one that
    returns anything but bool [B].
    """
    told, function = f"{key}={spec}", load_function(key, spec)
    check_call(told, function, GIVEN, {}, FORM)

    def keep(
        *,
        rewards: np.ndarray,
        accuracies: np.ndarray,
        group_ids: np.ndarray,
        lengths: np.ndarray,
        clipped: np.ndarray,
    ) -> np.ndarray:
        answer = np.asarray(
            function(
                rewards=rewards,
                accuracies=accuracies,
                group_ids=group_ids,
                lengths=lengths,
                clipped=np.asarray(clipped).astype(bool),
            )
        )
        if answer.dtype != np.bool_ or answer.shape != rewards.shape:
            raise ConfigError(
                f"{told} returned {answer.dtype} {list(answer.shape)}; it must be bool {list(rewards.shape)}, "
                "True for each response to keep"
            )
        return answer

    return keep
