"""Checks of the advantage estimator against the sections that define the rewards, and presets of corrections."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from difflib import get_close_matches

from mcore_rl.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    ListedCorrectionConfig,
    PolicyLossConfig,
    is_supervised,
)
from mcore_rl.config.fields import changed
from mcore_rl.config.objectives import RL
from mcore_rl.config.quantization import UNQUANTIZED
from mcore_rl.config.rules.objective import chosen_objective
from mcore_rl.config.rules.presets import PRESETS
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

NON_NEGATIVE = ("maxrl",)
"""Estimators that are defined for rewards of at least 0."""
OF_PARTS = "gdpo"
"""Estimator that reads the parts of the rewards instead of the rewards."""
OF_TOKENS = "optimal_token_baseline"
"""Estimator whose baseline minimizes the variance of an uncorrected gradient."""

OF_LABELS = "real"
"""Policy loss that classifies the responses of a group."""


def expand_preset(config: Config, given: Collection[str]) -> Config:
    """Replace algorithm.correction_preset by the values that it stands for. `given`: names of the keys that the user
    has set, including those set to their default.

    Raises: ConfigError for a run that samples nothing, for a loss or its options that differ from the preset's, and if
    other keys that it stands for are not at their defaults.
    """
    algorithm, name = config.algorithm, config.algorithm.correction_preset
    if name is None:
        return config
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError(f"algorithm.correction_preset={name} is not known{hint} Known: {', '.join(PRESETS)}.")
    preset, chosen = PRESETS[name], f"algorithm.correction_preset={name}"
    if config.trainer.objective != RL or is_supervised(algorithm):
        raise ConfigError(
            f"{chosen} corrects for the policy that sampled, and {chosen_objective(config)} samples nothing; remove it"
        )
    default = AlgorithmConfig()
    for key in ("corrections", "correction", "old_logp"):
        if getattr(algorithm, key) != getattr(default, key):
            raise ConfigError(
                f"{chosen} sets algorithm.corrections and algorithm.old_logp; remove algorithm.{key}, or the preset"
            )
    if preset.policy_loss is not None:
        _check_loss(algorithm.policy_loss, preset.policy_loss, chosen, given)
    # replace: the checks of a section run when it is built.
    config.algorithm = replace(
        algorithm,
        correction_preset=None,
        corrections=[ListedCorrectionConfig(**entry) for entry in preset.corrections],  # type: ignore[arg-type]  # by name
        correction=CorrectionConfig(kind="auto" if preset.corrections else "none"),
        old_logp=preset.old_logp,
        policy_loss=replace(algorithm.policy_loss, name=preset.policy_loss or algorithm.policy_loss.name),
    )
    return config


def _check_loss(loss: PolicyLossConfig, name: str, chosen: str, given: Collection[str]) -> None:
    """Reject another loss than `name`, which has no options, and options of another one."""
    sets = f"{chosen} sets algorithm.policy_loss.name={name}"
    if "algorithm.policy_loss.name" in given and loss.name != name:
        raise ConfigError(
            f"{sets}, but it is {loss.name}; remove algorithm.policy_loss.name, or set algorithm.corrections instead "
            "of the preset"
        )
    for key, value, _ in changed("algorithm.policy_loss", loss):
        if key != "algorithm.policy_loss.name":
            raise ConfigError(f"{key}={value} has no effect: {sets}, which has no options; remove {key}")


def check_estimator(config: Config) -> None:
    """Raise ConfigError for a reward that the estimator cannot use, for part_weights without their estimator, and for a
    loss of whole groups without groups."""
    algorithm = config.algorithm
    _check_label_losses(config)
    chosen = f"algorithm.advantage={algorithm.advantage}"
    if (algorithm.per_source or algorithm.baseline != "prompt") and is_supervised(algorithm):
        raise ConfigError(
            "algorithm.per_source and algorithm.baseline have no effect with algorithm.policy_loss.name=sft, which has "
            "no rewards; remove them"
        )
    _check_dynamic_sampling(algorithm)
    if algorithm.advantage == OF_PARTS and not algorithm.part_weights:
        raise ConfigError(
            f"{chosen} needs algorithm.part_weights, the weight of every part of the reward, such as "
            "algorithm.part_weights.correct=1 algorithm.part_weights.format=0.5"
        )
    if algorithm.part_weights and not any(algorithm.part_weights.values()):
        raise ConfigError("algorithm.part_weights are all 0, so that no part is trained; set at least one of them")
    if algorithm.length_penalty > 0 and algorithm.advantage == "remax":
        raise ConfigError(
            f"algorithm.length_penalty={algorithm.length_penalty:g}: {chosen} compares with a greedy response, whose "
            "group has no pass rate; choose another estimator, or set it to 0"
        )
    if algorithm.advantage == OF_TOKENS:
        _check_token_baseline(config)
    by_source = [(f"algorithm.per_source, {each.source}: advantage=", each.advantage) for each in algorithm.per_source]
    for key_of_name, name in [("algorithm.advantage=", algorithm.advantage), *by_source]:
        if name not in (*NON_NEGATIVE, OF_PARTS):
            continue
        reason = "reads the parts of the reward" if name == OF_PARTS else "needs rewards of at least 0"
        for key, remedy in _changes(config, name):
            raise ConfigError(f"{key} changes the reward, but {key_of_name}{name} {reason}; {remedy}")


def _check_dynamic_sampling(algorithm: AlgorithmConfig) -> None:
    """Reject dynamic sampling that drops groups whose advantages are not 0."""
    if not algorithm.dynamic_sampling.enable:
        return
    drops = f"algorithm.dynamic_sampling.enable=true with algorithm.baseline={algorithm.baseline}"
    if algorithm.baseline == "source":
        raise ConfigError(
            f"{drops} drops groups of equal rewards, but their advantages are not 0, since they are compared with all "
            "groups of their source; set algorithm.dynamic_sampling.enable=false, or algorithm.baseline=prompt"
        )
    if algorithm.baseline == "role" and algorithm.dynamic_sampling.metric == "accuracy":
        raise ConfigError(
            f"{drops} needs the rewards of each role, but algorithm.dynamic_sampling.metric=accuracy compares whole "
            "episodes; set algorithm.dynamic_sampling.metric=reward"
        )


def _check_label_losses(config: Config) -> None:
    """Reject a loss of whole groups, of any source, without groups."""
    of_sources = [f"algorithm.per_source, {source}: policy_loss.name" for source in config.algorithm.loss_sources]
    keys = ["algorithm.policy_loss.name", *of_sources]
    for key, settings in zip(keys, config.algorithm.loss_settings, strict=True):
        if settings.policy_loss.name == OF_LABELS and config.rollout.samples_per_prompt < 2:
            raise ConfigError(
                f"{key}={OF_LABELS} compares correct and wrong responses to a prompt, but "
                "rollout.samples_per_prompt=1; set it to at least 2"
            )


def _check_token_baseline(config: Config) -> None:
    """Reject weights of the tokens, which the baseline does not contain."""
    algorithm = config.algorithm
    entries: list[CorrectionConfig] = [*algorithm.corrections] or [algorithm.correction]
    quantization, automatic = config.rollout.quantization, algorithm.correction.kind == "auto"
    if automatic and not algorithm.corrections and quantization != UNQUANTIZED and algorithm.old_logp == "trainer":
        raise ConfigError(
            f"algorithm.correction.kind=auto weighs tokens with rollout.quantization={quantization}, but the baseline "
            f"of algorithm.advantage={OF_TOKENS} is optimal without weights only; set it to none or reject"
        )
    for entry in entries:
        if entry.kind in ("truncate", "mask") and entry.apply:
            raise ConfigError(
                f"{entry.PREFIX}kind={entry.kind} weighs tokens, but the baseline of algorithm.advantage={OF_TOKENS} "
                "is optimal without weights only; set it to reject"
            )


def _changes(config: Config, name: str) -> Iterator[tuple[str, str]]:
    """Yield keys, with the remedy, that subtract from the rewards of estimator `name` outside of their parts."""
    incorrect = config.reward.incorrect
    if name in NON_NEGATIVE and incorrect < 0:
        yield f"reward.incorrect={incorrect:g}", "set it to 0"
    if config.reward.punishes_overlong:
        yield "reward.overlong (on by reward.overlong.enable or reward.manager)", "set reward.overlong.enable=false"
    if config.algorithm.length_penalty > 0:
        yield f"algorithm.length_penalty={config.algorithm.length_penalty:g}", "set it to 0"
    if config.algorithm.kl.in_reward > 0:
        yield (
            f"algorithm.kl.in_reward={config.algorithm.kl.in_reward:g}",
            "set it to 0, and algorithm.kl.in_loss instead",
        )
