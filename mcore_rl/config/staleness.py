"""Keys of `rollout` for asynchronous training: how far generation may run ahead of the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.fields import setting

KEEP, RECOMPUTE, FINISH = "keep", "recompute", "finish"
HARD_SLACK = 2
"""Default of rollout.max_staleness_hard minus rollout.max_staleness, in versions."""


@dataclass
class StalenessConfig:
    """Asynchronous keys of RolloutConfig."""

    max_staleness: int = setting(0, minimum=0, unit="versions")
    """Maximum average age of trained groups, in weight versions. 0: synchronous, each step trains on responses of the
    current weights. Above 0, engines generate while the trainer updates (needs cluster.placement=disaggregated). 1 with
    rollout.max_staleness_hard=1 and rollout.swap=finish is one-step-off training."""
    max_staleness_hard: int | None = setting(None, minimum=1, unit="versions")
    """Maximum age of a trained group. No group is discarded: groups that finish first may be trained first only while
    all others can still be trained in time. Equal to rollout.max_staleness: groups are trained in the order of
    submission. null: rollout.max_staleness + 2."""
    swap: str = setting(KEEP, choices=(KEEP, RECOMPUTE, FINISH))
    """Treatment of running responses when weights change. keep: keep their KV cache. recompute: recompute it with the
    new weights. finish: finish them before the weights change."""
    partial_tokens: int | None = setting(None, minimum=1, unit="tokens")
    """Number of tokens that a response (each turn of an episode) may sample with one weight version. It then pauses and
    frees its slot and KV cache until the next version, or until its engine is idle. null: no limit."""

    replay_schedule: str | None = setting(None, path=True)
    """Run directory of an earlier asynchronous run with rollout.swap=recompute whose steps are repeated bit for bit:
    each response samples its tokens with the recorded weight versions. null: no replay."""

    @property
    def hard_staleness(self) -> int:
        """Effective maximum age of a group."""
        return self.max_staleness + HARD_SLACK if self.max_staleness_hard is None else self.max_staleness_hard
