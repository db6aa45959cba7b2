"""The part of a step between its responses and the weight sync: batch, passes over it, and updates of the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from mcore_rl.algorithms.entropy_controller import EntropyController
from mcore_rl.config.rules.teacher import uses_teacher
from mcore_rl.config.schema import Config
from mcore_rl.ports import Actor, Critic, Teacher
from mcore_rl.trainer.reference import Reference
from mcore_rl.types import Batch, BatchHandle, Groups, Mean, Metric, merge_metrics


class UpdateParts(Protocol):
    """Parts of a run that an update needs; see trainer.run.Run."""

    @property
    def config(self) -> Config: ...

    @property
    def actor(self) -> Actor: ...

    @property
    def critic(self) -> Critic | None: ...

    @property
    def reference(self) -> Reference | None: ...

    @property
    def teacher(self) -> Teacher | None: ...

    @property
    def entropy(self) -> EntropyController | None: ...

    @property
    def batch_of(self) -> Callable[[Groups, int, int], Batch]: ...

    @property
    def estimates_tokens(self) -> bool: ...


def update_models(run: UpdateParts, groups: Groups, step: int, version: int) -> dict[str, Metric]:
    """Train policy and critic on the groups of a step. `version`: weight version at the start of the step. Returns the
    metrics of all passes.

    Raises: NonFiniteError before an optimizer step with non-finite values.
    """
    batch = run.batch_of(groups, step, version)
    # First: engines and other ranks that share GPUs with these ranks need the memory that later passes use.
    scores = run.teacher.scores(batch) if run.teacher is not None else None
    logp = run.actor.recompute_logp(batch)  # returns a handle; the tensors stay on the ranks
    if run.reference is not None:
        logp = run.reference.apply(run.actor, groups, logp)
    if uses_teacher(run.config.teacher):
        logp = run.actor.teacher_outputs(logp, scores)
    # Per-token estimators run here, with the critic's values and the reference's KL; others ran in batch_of.
    logp, critic = estimate(run, logp)
    update: dict[str, Metric] = {}
    if step > run.config.trainer.critic_warmup_steps:
        update = _update_actor(run, logp)
    return merge_metrics([logp.metrics, critic, update])


def _update_actor(run: UpdateParts, logp: BatchHandle) -> dict[str, Metric]:
    """Train the policy, and adapt the coefficient of the entropy bonus for the next step."""
    if run.entropy is None:
        return run.actor.update(logp)
    bonus = run.entropy.bonus
    update = run.actor.update(replace(logp, entropy_coefficient=bonus))
    run.entropy.update(update["actor/entropy"].value)
    return {**update, "actor/entropy_coefficient": Mean(bonus, 1)}


def estimate(run: UpdateParts, logp: BatchHandle) -> tuple[BatchHandle, dict[str, Metric]]:
    """Compute values and per-token advantages on the ranks and update the critic, if the estimator works per token.
    Returns the batch and the critic's metrics."""
    if not run.estimates_tokens:
        return logp, {}
    values = run.critic.values(logp.batch) if run.critic else None
    logp, returns = run.actor.estimate(logp, values)
    return logp, run.critic.update(values, returns) if run.critic and values else {}
