"""Penalty of long responses, scaled by the pass rate of their group: algorithm.length_penalty.

    r'_i = r_i - c n_i max(p_G, 1 / K)

c: algorithm.length_penalty, per token; n_i: trained tokens of response i; p_G: fraction of the K responses of its group
whose accuracy is above 0.5. Tokens of responses to easy prompts cost more; 1 / K keeps a small cost if no response is
right. The penalty changes the rewards from which advantages are computed. Dynamic sampling and reward/mean use the
rewards without it. With algorithm.baseline=role, n_i are the tokens of a role in an episode, and the group is the
prompt's episodes in which the role speaks.

Source: Adaptive Length Penalty, arXiv 2506.05256, with the penalty beta N max(p, 1 / K). Here N is the number of
trained tokens, not normalized, so c is beta.
"""

from __future__ import annotations

import numpy as np

RIGHT = 0.5
"""Accuracy above which a response counts as right."""


def length_penalties(
    per_token: float, *, lengths: np.ndarray, accuracies: np.ndarray, group_ids: np.ndarray
) -> np.ndarray:
    """Compute the penalty of each response, at least 0, to be subtracted from its reward.

    Shapes: lengths int [B] (trained tokens), accuracies float [B], group_ids int64 [B] -> float64 [B].
    """
    _, group = np.unique(group_ids, return_inverse=True)
    sizes = np.bincount(group)
    right = np.bincount(group, accuracies > RIGHT)
    rates = np.maximum(right, 1) / sizes
    penalties: np.ndarray = per_token * lengths * rates[group]
    return penalties
