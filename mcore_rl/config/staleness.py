"""Keys of `rollout` that say how far generation may be ahead of the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.fields import setting

KEEP, RECOMPUTE, FINISH = "keep", "recompute", "finish"
HARD_SLACK = 2
"""Versions that a group may be older than rollout.max_staleness, unless the configuration says how many."""


@dataclass
class StalenessConfig:
    """The part of RolloutConfig that is about asynchronous rollouts."""

    max_staleness: int = setting(0, minimum=0, unit="versions")
    """How old, in versions of the weights, a group is on average when it is trained. 0: synchronous, everything is
    generated with the weights that train on it; above 0 engines generate while the trainer updates
    (cluster.placement=disaggregated). 1 with rollout.max_staleness_hard=1 and rollout.swap=finish is one step off."""
    max_staleness_hard: int | None = setting(None, minimum=1, unit="versions")
    """No group is older than this when it is trained, and none is thrown away: long responses are overtaken by others
    only as long as all can still be trained in time. As much as rollout.max_staleness: in the order of submission.
    null: 2 more than that."""
    swap: str = setting(KEEP, choices=(KEEP, RECOMPUTE, FINISH))
    """What new weights do to responses in progress: they go on with the KV cache of the earlier weights (keep), compute
    it anew (recompute), or end before the weights change (finish)."""
    partial_tokens: int | None = setting(None, minimum=1, unit="tokens")
    """A response (each turn of one) that has drawn so many tokens under one version of the weights is parked: it gives
    its place and its KV cache to others until the next weights, or until its engine has nothing else to run.
    null: none is."""

    replay_schedule: str | None = setting(None, path=True)
    """The run directory of an earlier asynchronous run with rollout.swap=recompute, whose steps are repeated bit for
    bit: each response draws its tokens under the versions that drew them then. null: weights change when they come."""

    @property
    def hard_staleness(self) -> int:
        """The bound that holds."""
        return self.max_staleness + HARD_SLACK if self.max_staleness_hard is None else self.max_staleness_hard
