"""The loss of a response depends on its data_source:

    algorithm:
      policy_loss: {name: ppo_clip, clip_high: 0.28}              all other sources
      entropy_coefficient: 0.001
      per_source:
        - {source: code, weight: 2, policy_loss: {name: gspo, clip_low: 3e-4, clip_high: 4e-4}}
        - {source: chat, entropy_coefficient: 0, kl_in_loss: 0.01}

Each entry with policy_loss, entropy_coefficient or kl_in_loss has a loss of its own; a missing one of these keys has
the value of the section. policy_loss names the loss and has its options; options of algorithm.policy_loss do not apply.
All other keys of the loss, such as corrections and drift_penalty, are common to all sources.

    L = sum_i w_i sum_t L^(s(i))_it,     w_i = weight(s(i)) / denominator of algorithm.loss_aggregation

    s(i): source of response i. The denominator counts the responses of all sources. The gradient is the sum of the
    gradients of the sources alone with these weights, for any packing and layout: a loss gets the tokens of its own
    responses only. Results over a whole update (clip_cov, kl_cov, real, high_entropy_share, measure second_moment)
    cover its own responses only, too.

A forward pass that the loss of one source needs covers the responses of all sources. Metrics of the losses cover all
sources; a source with its own loss has them again under its name, such as actor/clip_fraction/code. If one of the
losses is user-defined, the names without a source cover only the sources without a loss of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mcore_rl.algorithms.corrections import Correction
from mcore_rl.algorithms.interface import PolicyLoss
from mcore_rl.algorithms.registry import policy_loss, policy_loss_options
from mcore_rl.algorithms.terms import terms_need_old_logp
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.quantization import UNQUANTIZED
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

ACTOR_INPUTS = {
    *("advantages", "old_logp", "rollout_logp", "staleness"),
    *("whole_sequence", "whole_group", "selection", "pairs", "scores"),
}
"""Fields of Needs that the actor can provide to a loss."""


def configured_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Build the configured policy loss, of the sources that have no loss of their own.

    Raises: ConfigError like configured_losses.
    """
    return configured_losses(algorithm)[0]


def configured_losses(algorithm: AlgorithmConfig) -> list[PolicyLoss]:
    """Build the policy loss of each entry of AlgorithmConfig.loss_settings and check that the actor can provide its
    inputs.

    Raises: ConfigError for an unknown loss or option, for a loss that needs an unavailable input, for a correction that
    a loss does not support, for keys that require_samples rejects, or for algorithm.old_logp=rollout without use. It
    names the source, if it is of one.
    """
    default, *others = algorithm.loss_settings
    losses = [_checked_loss(default)]
    if algorithm.per_source:
        require_samples("algorithm.per_source", algorithm, losses[0])
    if algorithm.baseline != "prompt":
        require_samples(f"algorithm.baseline={algorithm.baseline}", algorithm, losses[0])
    for source, settings in zip(algorithm.loss_sources, others, strict=True):
        try:
            losses.append(_checked_loss(settings))
            if not losses[-1].needs.advantages:
                raise ConfigError(
                    f"algorithm.policy_loss.name={settings.policy_loss.name} has no advantages; losses of sources are "
                    "policy losses: add Needs(advantages=True) to its attribute needs, or choose another one"
                )
        except ConfigError as error:
            # The messages name keys of the section; the entry has keys of the same names.
            own = str(error).replace("algorithm.policy_loss", "policy_loss")
            raise ConfigError(f"algorithm.per_source, {source}: {own}") from None
    if algorithm.old_logp == "rollout":
        _check_old_policy(algorithm, losses)
    return losses


def require_samples(key: str, algorithm: AlgorithmConfig, loss: PolicyLoss) -> None:
    """Require that `loss`, the default one, is of sampled responses. `key`, with its value, has no effect otherwise.

    Raises: ConfigError for a loss without advantages, which trains on texts of the data set.
    """
    if not loss.needs.advantages:
        raise ConfigError(
            f"{key} has no effect: algorithm.policy_loss.name={algorithm.policy_loss.name} has no advantages and so "
            "samples no responses; add Needs(advantages=True) to its attribute needs, or remove the key"
        )


def _checked_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    section = algorithm.policy_loss
    loss = policy_loss(section.name, **policy_loss_options(section))
    missing = [name for name, needed in vars(loss.needs).items() if needed and name not in ACTOR_INPUTS]
    if missing:
        raise ConfigError(f"algorithm.policy_loss.name={section.name} needs {', '.join(missing)}: not available")
    kind = algorithm.correction.kind
    given = "algorithm.corrections" if algorithm.corrections else f"algorithm.correction.kind={kind}"
    if (algorithm.corrections or kind not in ("auto", "none")) and not _supports_corrections(loss):
        remedy = "remove the list" if algorithm.corrections else "set it to none"
        raise ConfigError(f"{given}: algorithm.policy_loss.name={section.name} does not support corrections; {remedy}")
    if algorithm.old_logp == "rollout" and loss.needs.rollout_logp and loss.needs.old_logp:
        raise ConfigError(
            f"algorithm.old_logp=rollout has no effect: algorithm.policy_loss.name={section.name} reads the "
            "log-probabilities of both; set it to trainer"
        )
    return loss


def _check_old_policy(algorithm: AlgorithmConfig, losses: Sequence[PolicyLoss]) -> None:
    """Reject algorithm.old_logp=rollout if no loss and no term reads the old policy."""
    pairs = zip(algorithm.loss_settings, losses, strict=True)
    if not any(loss.needs.old_logp or terms_need_old_logp(settings) for settings, loss in pairs):
        raise ConfigError(
            f"algorithm.old_logp=rollout has no effect: algorithm.policy_loss.name={algorithm.policy_loss.name} reads "
            "no old policy; set it to trainer"
        )


def configured_corrections(config: Config, loss: PolicyLoss) -> tuple[Correction, ...]:
    """Build the configured corrections for `loss`, one of the configured losses."""
    if config.algorithm.corrections:
        return tuple(Correction(entry) for entry in config.algorithm.corrections)
    section = config.algorithm.correction
    if section.kind == "auto":
        # With the engine's log-probabilities as the old policy, the loss's ratio contains the weight.
        weighs = config.algorithm.old_logp == "trainer" and _supports_corrections(loss)
        corrected = config.rollout.quantization != UNQUANTIZED and weighs
        section = replace(section, kind="truncate" if corrected else "none")
    return () if section.kind == "none" else (Correction(section),)


def _supports_corrections(loss: PolicyLoss) -> bool:
    # A loss that reads rollout_logp applies an importance weight itself; a loss without advantages uses no rollouts.
    return loss.needs.advantages and not loss.needs.rollout_logp
