"""Forward passes that a step makes before its updates. The ranks and `mcore-rl plan` use the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.algorithms.configured import configured_corrections, configured_losses
from mcore_rl.algorithms.corrections import Correction
from mcore_rl.algorithms.interface import PolicyLoss
from mcore_rl.algorithms.registry import advantage_options, estimator
from mcore_rl.algorithms.terms import terms_need_old_logp
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.rules.models import has_reference
from mcore_rl.config.rules.teacher import uses_teacher
from mcore_rl.config.schema import Config


@dataclass(frozen=True)
class StepPasses:
    """Forward passes before the updates of a step of reinforcement learning or supervised training, besides the
    teachers' and the critic's.

    later_updates: the policy's, over the samples of all updates except the first. first_update: the policy's, over the
    samples of the first update, for the KL term of the rewards. score_norms: the policy's, over all samples.
    before_first, before_later: the policy's before the first update, and before every other update of all epochs, over
    its samples; see passes_before_update. reference: the reference's, over all samples.
    """

    later_updates: bool
    first_update: bool
    score_norms: bool
    before_first: bool
    before_later: bool
    reference: bool

    @classmethod
    def of(cls, config: Config) -> StepPasses:
        """Return the passes of the configured run. Raises: ConfigError like configured_losses."""
        algorithm, losses = config.algorithm, configured_losses(config.algorithm)
        has_teacher = uses_teacher(config.teacher)
        distils = has_teacher and config.teacher.in_advantage > 0
        needs = estimator(algorithm.advantage, **advantage_options(algorithm)).needs
        # A pass covers the samples of all sources if the loss of one source needs it.
        by_source = [
            (settings, loss, configured_corrections(config, loss))
            for settings, loss in zip(algorithm.loss_settings, losses, strict=True)
        ]
        reads = any(needs_old_logp(*each, distils=distils) for each in by_source)
        before_first, before_later = (
            any(passes_before_update(*each, is_first=is_first, has_teacher=has_teacher) for each in by_source)
            for is_first in (True, False)
        )
        return cls(
            later_updates=passes_over_later_updates(config, needs_old_logp=reads),
            first_update=algorithm.kl.in_reward > 0,
            score_norms=losses[0].needs.advantages and needs.score_norms,
            before_first=before_first,
            before_later=before_later,
            reference=has_reference(config),
        )


def passes_over_later_updates(config: Config, *, needs_old_logp: bool) -> bool:
    """Return True if a pass before the updates has results that the loss, the KL term of the rewards, or a replay of
    the policy's own routing uses."""
    return needs_old_logp or config.algorithm.kl.in_reward > 0 or config.actor.moe.router_replay == "policy"


def needs_old_logp(
    algorithm: AlgorithmConfig, loss: PolicyLoss, corrections: Sequence[Correction], *, distils: bool
) -> bool:
    """Return True if updates need the log-probabilities of the policy before the first update. `distils`: a teacher
    changes the advantages."""
    if algorithm.old_logp == "rollout":
        return False
    if distils or terms_need_old_logp(algorithm):
        return True
    return loss.needs.old_logp or any(correction.needs_old_logp for correction in corrections)


def chooses_tokens(algorithm: AlgorithmConfig, loss: PolicyLoss, corrections: Sequence[Correction]) -> bool:
    """Return True if an update needs tokens that are chosen among all its tokens."""
    corrects = any(correction.chooses_tokens for correction in corrections)
    return loss.needs.selection or corrects or algorithm.high_entropy_share < 1


def passes_before_update(
    algorithm: AlgorithmConfig,
    loss: PolicyLoss,
    corrections: Sequence[Correction],
    *,
    is_first: bool,
    has_teacher: bool,
) -> bool:
    """Return True if an update needs the current log-probabilities of all its tokens, to choose tokens or to compare
    the responses of a group.

    Before the first update the policy is the old one, so that its log ratios are 0 without a pass.
    """
    ratios_are_zero = is_first and algorithm.old_logp == "trainer" and not has_teacher
    return chooses_tokens(algorithm, loss, corrections) or (loss.needs.whole_group and not ratios_are_zero)
