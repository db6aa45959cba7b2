"""The policy loss that a configuration asks for, checked against what a trainer can give it."""

from __future__ import annotations

from mcore_rl.algorithms.interface import PolicyLoss
from mcore_rl.algorithms.registry import policy_loss, policy_loss_options
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.errors import ConfigError

PROVIDED = {"advantages", "old_logp", "rollout_logp", "staleness", "whole_sequence", "selection"}
"""Of Needs: what the ranks have for a loss."""


def configured_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Raises: ConfigError for an unknown loss or option, one that needs what the actor does not have, or a correction
    of a loss that leaves no place for it."""
    section = algorithm.policy_loss
    loss = policy_loss(section.name, **policy_loss_options(section))
    lacking = [name for name, needed in vars(loss.needs).items() if needed and name not in PROVIDED]
    if lacking:
        raise ConfigError(f"algorithm.policy_loss.name={section.name} needs {', '.join(lacking)}: not available")
    kind = algorithm.correction.kind
    # A loss that reads what the engine sampled with has a weight of its own; one without advantages, no engine.
    if kind != "none" and (loss.needs.rollout_logp or not loss.needs.advantages):
        raise ConfigError(
            f"algorithm.correction.kind={kind}: algorithm.policy_loss.name={section.name} has no place for it; set "
            "it to none"
        )
    return loss
