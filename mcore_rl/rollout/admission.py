"""Which groups may begin, and which may be trained: rules on what exists now, never on what has happened.

    submitted at version s -> running -> finished -> in training (one version) -> gone

A version consumes `groups_per_version` groups. So many exist at once that a group is `max_staleness` versions old on
average when it is trained; those with long responses are overtaken by others, but only as long as every group can still
be trained within `max_staleness_hard` versions. Neither rule remembers anything, so groups that are rejected, fail or
are lost, and a resume, cannot make them wait for ever: whoever does not exist any more is not counted.
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
    """Whether another group may begin. To be asked again whenever a group finishes, is rejected, fails, or is trained.

    `running`, `finished` and `in_training` count groups; `running_requests` and `slots` count requests, of all engines.
    It cannot stop for ever while `samples_per_group` <= `slots`: a trainer that waits has nothing in training, and
    either something runs, which ends, or less than a version's groups have finished, and another one may begin.
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
    """Which finished groups a step of `version` trains: the oldest; None while it has to wait.

    `finished` and `running` are the versions at which groups were submitted, in any order; returned are indices of
    `finished`. It waits where fewer than `groups_per_version` have finished, or where those that are left could not all
    be trained in time: of groups that were submitted at v or before, no more may be left than the steps of the versions
    up to v + max_staleness_hard take. The oldest ones always pass once all that runs has ended, if max_staleness_hard
    >= max_staleness.

    Costs groups times their logarithm.
    """
    if len(finished) < groups_per_version:
        return None
    taken = np.argsort(np.asarray(finished, np.int64), kind="stable")
    left = np.sort(np.concatenate([np.asarray(finished, np.int64)[taken[groups_per_version:]], running]))
    numbers = np.arange(1, len(left) + 1)  # of those that are left, submitted at left[i] or before, at least
    steps = np.maximum(left + max_staleness_hard - version, 0)
    if (numbers > steps * groups_per_version).any():
        return None
    return sorted(taken[:groups_per_version].tolist())
