"""How old the groups of a step are, in versions of the weights, when they are trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_rl.types import Max, Mean, Metric, RolloutScalars


def describe_staleness(submitted: Sequence[int], scalars: Sequence[RolloutScalars], version: int) -> dict[str, Metric]:
    """Of groups that were submitted at these versions and are trained at `version`.

    staleness/mean and max are of groups, tokens_mean of trained tokens, groups_N the share of groups that are N
    versions old, mixed_fraction the share of responses that different weights have drawn.
    """
    ages = version - np.asarray(submitted, np.int64)
    versions = np.concatenate([part.versions for part in scalars])
    tokens = sum(int(part.trained_tokens.sum(dtype=np.int64)) for part in scalars)
    drawn_at = sum(int(part.version_sums.sum()) for part in scalars if part.version_sums is not None)
    return {
        "staleness/mean": Mean(float(ages.sum()), len(ages)),
        "staleness/max": Max(float(ages.max(initial=0))),
        "staleness/tokens_mean": Mean(float(version * tokens - drawn_at), tokens),
        "staleness/mixed_fraction": Mean(float((versions[:, 0] != versions[:, 1]).sum()), len(versions)),
        **{f"staleness/groups_{age}": Mean(float((ages == age).sum()), len(ages)) for age in range(ages.max() + 1)},
    }
