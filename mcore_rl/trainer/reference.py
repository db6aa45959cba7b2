"""Use of the reference policy in the loop: KL penalty on rewards, KL coefficient, refresh. Controllers of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mcore_rl.algorithms import Estimator
from mcore_rl.algorithms.entropy_controller import EntropyController
from mcore_rl.algorithms.kl_controller import KLController
from mcore_rl.config.rules.models import uses_reference
from mcore_rl.config.schema import Config
from mcore_rl.ports import Actor
from mcore_rl.trainer.batches import response_advantages
from mcore_rl.trainer.diagnostics import describe_advantages
from mcore_rl.trainer.sources import Sources
from mcore_rl.types import BatchHandle, Groups, Mean, Metric

KL_CONTROLLER, ENTROPY_CONTROLLER = "kl_controller", "entropy_controller"
"""Names of the controllers' states in the `positions` of a checkpoint."""
CONTROLLERS = {
    KL_CONTROLLER: ("KL", "algorithm.kl.controller"),
    ENTROPY_CONTROLLER: ("entropy", "algorithm.entropy_control.target"),
}
"""Controlled coefficient of each state, and the key that switches the controller on."""


@dataclass(frozen=True)
class Reference:
    """Reference policy of a run whose loss or reward has a KL term.

    `controller` is set if the reward has a KL term. `advantages_of` is set if the driver computes one advantage per
    response: (groups, rewards [B] in the order of the batch) -> advantages [B].
    """

    controller: KLController | None = None
    advantages_of: Callable[[Groups, np.ndarray], np.ndarray] | None = None
    refresh_every_steps: int = 0

    def apply(self, actor: Actor, groups: Groups, logp: BatchHandle) -> BatchHandle:
        """Return the batch with the reference's log-probabilities; if the reward has a KL term, also with advantages of
        the penalized rewards. Per-token estimators apply the penalty on the ranks."""
        referred = actor.reference_logp(logp)
        if self.controller is None:
            return referred
        # This step uses the current coefficient; the update below affects the next step.
        coefficient = self.controller.coefficient
        penalized, penalties = actor.kl_penalties(referred, coefficient)
        metrics: dict[str, Metric] = {**penalized.metrics, "reward/kl_coefficient": Mean(coefficient, 1)}
        self.controller.update(metrics["reward/kl"].value, len(logp.batch))
        penalized = replace(penalized, metrics=metrics)
        if self.advantages_of is None:
            return penalized
        return actor.with_advantages(penalized, self.advantages_of(groups, logp.batch.rewards - penalties))

    def refresh(self, actor: Actor, step: int) -> None:
        """Refresh the reference if it is due after the updates of `step`."""
        if self.refresh_every_steps and step % self.refresh_every_steps == 0:
            actor.refresh_reference()


def build_reference(
    config: Config,
    estimator: Estimator,
    record: Callable[[dict[str, Metric]], None],
    sources: Sources | None = None,
) -> tuple[Reference | None, dict[str, KLController]]:
    """Return the reference policy, None without KL terms, and the KL controller whose state checkpoints contain, by its
    name there. `record` receives metrics of the advantages of penalized rewards; `sources`: of the training prompts."""
    kl = config.algorithm.kl
    if not uses_reference(config.algorithm):
        return None, {}
    controller, advantages_of = KLController.from_config(kl), response_advantages(config.algorithm, sources)

    def recorded(groups: Groups, rewards: np.ndarray) -> np.ndarray:
        advantages = advantages_of(groups, rewards)
        record(describe_advantages(advantages))
        return advantages

    refresh = config.reference.refresh_every_steps
    reference = Reference(controller, recorded if controller and estimator.per_response else None, refresh)
    return reference, {KL_CONTROLLER: controller} if controller and kl.controller == "adaptive" else {}


def build_controllers(
    config: Config,
    estimator: Estimator,
    record: Callable[[dict[str, Metric]], None],
    sources: Sources | None = None,
) -> tuple[Reference | None, EntropyController | None, dict[str, KLController | EntropyController]]:
    """Return the result of build_reference, the controller of the entropy bonus (None if its coefficient is fixed), and
    all controllers whose states checkpoints contain, by their names there."""
    reference, controllers = build_reference(config, estimator, record, sources)
    entropy = EntropyController.from_config(config.algorithm)
    return reference, entropy, {**controllers, **({} if entropy is None else {ENTROPY_CONTROLLER: entropy})}
