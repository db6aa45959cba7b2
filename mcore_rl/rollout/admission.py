"""Admission rules of asynchronous training: whether a group may start, and which groups are trained.

    submitted at version s -> running -> finished -> in training (one version) -> gone

Each weight version consumes `groups_per_version` groups. The number of existing groups is limited such that a group is
`max_staleness` versions old on average when it is trained. Groups with long responses may be overtaken by others, but
only while every group can still be trained within `max_staleness_hard` versions.

Both rules depend only on the groups that exist now, never on history. Groups that are rejected, fail or are lost, and a
resume, therefore cannot block them forever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def may_submit(
    *,
    running: int,
    finished: int,
    in_training: int,
    groups_per_version: int,
    max_staleness: int,
    running_requests: int,
    slots: int,
    samples_per_group: int,
) -> bool:
    """Return True if another group may start. Call it again whenever a group finishes, is rejected, fails, or is
    trained.

    `running`, `finished` and `in_training` count groups; `running_requests` and `slots` count requests on all engines.
    It cannot block forever if `samples_per_group` <= `slots`: while the trainer waits, nothing is in training, so
    either groups are running and will finish, or fewer groups than one version needs have finished and another may
    start.
    """
    exist = running + finished + in_training
    room = running_requests + samples_per_group <= slots
    return room and exist < (max_staleness + 1) * groups_per_version


def take_batch(
    finished: Sequence[int],
    running: Sequence[int],
    *,
    version: int,
    groups_per_version: int,
    max_staleness_hard: int,
) -> list[int] | None:
    """Return the finished groups that a step of `version` trains (the oldest ones), or None if it must wait.

    `finished` and `running` hold the submission versions of groups, in any order; the result holds indices into
    `finished`. The step waits if fewer than `groups_per_version` groups have finished, or if the remaining groups could
    not all be trained in time: among the groups submitted at version v or earlier, no more may remain than the steps up
    to version v + max_staleness_hard consume. The oldest groups are always accepted once all running groups have
    finished, provided that max_staleness_hard >= max_staleness.

    Cost: O(n log n) for n groups.
    """
    if len(finished) < groups_per_version:
        return None
    # The oldest groups are taken; the rest, finished or running, must still be trainable in later steps.
    taken = np.argsort(np.asarray(finished, np.int64), kind="stable")
    left = np.sort(np.concatenate([np.asarray(finished, np.int64)[taken[groups_per_version:]], running]))
    numbers = np.arange(1, len(left) + 1)  # numbers[i]: remaining groups submitted at left[i] or earlier
    # steps[i]: training steps after this one until the group submitted at left[i] is too old.
    steps = np.maximum(left + max_staleness_hard - version, 0)
    if (numbers > steps * groups_per_version).any():
        return None
    return sorted(taken[:groups_per_version].tolist())
