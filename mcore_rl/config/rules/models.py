"""Rules for adapters (LoRA), the reference policy, the reward model, and the keys of section `reward`."""

from __future__ import annotations

from operator import attrgetter

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.fields import changed, reject_unless_default
from mcore_rl.config.functions import names_function
from mcore_rl.config.models import FSDP2, ActorConfig, ReferenceConfig, RewardModelConfig
from mcore_rl.config.reward import BATCH, BY_DATA_SOURCE, DAPO, GROUP, NAIVE, NO_RULE, STEP, JudgeConfig, RewardConfig
from mcore_rl.config.rules.objective import compares_with_reference, no_reference
from mcore_rl.config.rules.rollout import episode_of, has_turns
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.errors import ConfigError

UNSUPPORTED = {
    "model.random_init": "checkpoints contain adapters only, and the base model is read again from model.hf_path; set "
    "it to false",
    "actor.mtp_loss_coefficient": "PEFT's adapters have no names for multi-token-prediction layers; set it to 0",
    "actor.train_vision": "adapters belong to the decoder, and all other weights are frozen; set it to false",
    "actor.moe.bias_update_rate": "the bias belongs to the frozen weights; set it to 0",
    "actor.fp8": "models with adapters are built without TransformerEngine, which has the FP8 kernels; set it to none",
    "reference.refresh_every_steps": "the reference is the base model without adapters and cannot change; set it to 0",
}
"""Keys that adapters do not support, with the reason and the remedy."""
FROZEN_MODEL_KEYS = "hf_path weight strategy num_ranks tokens_per_microbatch moe.dispatcher fp8 offload.params".split()
"""Keys of section reward_model, besides parallel.*, that have an effect: the model is not trained and predicts no
tokens."""


UNBIASED_KINDS = ("k1", "low_var", "k3")
"""Estimators of the KL whose mean over tokens of the policy is the KL."""


def uses_lora(actor: ActorConfig) -> bool:
    """Return True if adapters are trained instead of the weights."""
    return actor.lora.rank > 0


def base_is_reference(actor: ActorConfig, reference: ReferenceConfig) -> bool:
    """Return True if the base model of the adapters is the reference of the KL terms."""
    return uses_lora(actor) and reference.hf_path is None


def check_lora(config: Config) -> None:
    """Raise ConfigError for a key that has no effect or that adapters do not support."""
    lora = config.actor.lora
    if not uses_lora(config.actor):
        remedy = "set actor.lora.rank above 0, so that there are adapters"
        reject_unless_default("actor.lora", lora, remedy)
        reject_unless_default("trainer", config.trainer, remedy, ("export_adapter",))
        return
    if len(set(lora.target_modules)) != len(lora.target_modules):
        raise ConfigError(f"actor.lora.target_modules={list(lora.target_modules)} names a module twice")
    if base_is_reference(config.actor, config.reference) and not config.reference.offload:
        raise ConfigError(
            f"reference.offload=False has no effect with actor.lora.rank={lora.rank}: the reference is the policy "
            "without its adapters and has no weights of its own; leave it at True, or set reference.hf_path"
        )
    for key, reason in UNSUPPORTED.items():
        # All these keys are 0, false or none by default.
        value = attrgetter(key)(config)
        if value and value != "none":
            raise ConfigError(f"{key}={value} is not supported with actor.lora.rank={lora.rank}: {reason}")


def reject_suggestions(actor: ActorConfig) -> None:
    """Raise ConfigError if adapters are trained or parameters are sharded: `plan --suggest` assumes neither."""
    if actor.strategy == FSDP2:
        raise ConfigError(
            f"--suggest compares layouts of Megatron's model, but actor.strategy={FSDP2} has only one; run plan "
            "without --suggest, or set it to megatron"
        )
    if actor.parallel.shard_parameters:
        raise ConfigError(
            "--suggest compares layouts without actor.parallel.shard_parameters; run plan on your own layout without "
            "--suggest, or set it to false"
        )
    if uses_lora(actor):
        raise ConfigError(
            f"--suggest assumes gradients and optimizer state for all weights, but actor.lora.rank="
            f"{actor.lora.rank} trains only adapters; run plan on your own layout without --suggest, or set "
            "actor.lora.rank to 0 for layouts that fit with and without adapters"
        )


def uses_reference(algorithm: AlgorithmConfig) -> bool:
    """Return True if the loss, of any source, or the reward has a KL term."""
    return has_loss_kl(algorithm) or algorithm.kl.in_reward > 0


def has_loss_kl(algorithm: AlgorithmConfig) -> bool:
    """Return True if the loss of any source has a KL term."""
    return any(settings.kl.in_loss > 0 for settings in algorithm.loss_settings)


def check_terms(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for parts of the loss that supervised training does not have, or an anchor without a
    penalty."""
    if algorithm.high_entropy_share < 1 and is_supervised(algorithm):
        raise ConfigError(
            f"algorithm.high_entropy_share={algorithm.high_entropy_share}: algorithm.policy_loss.name="
            f"{algorithm.policy_loss.name} trains on all target tokens; set it to 1"
        )
    if algorithm.observation_coefficient and is_supervised(algorithm):
        raise ConfigError(
            f"algorithm.observation_coefficient={algorithm.observation_coefficient}: algorithm.policy_loss.name="
            f"{algorithm.policy_loss.name} trains on texts without episodes; set it to 0"
        )
    _check_entropy_control(algorithm)
    penalty = algorithm.drift_penalty
    if not penalty.coefficient:
        reject_unless_default("algorithm.drift_penalty", penalty, "set algorithm.drift_penalty.coefficient above 0")
    elif is_supervised(algorithm):
        raise ConfigError(
            f"algorithm.drift_penalty.coefficient={penalty.coefficient}: algorithm.policy_loss.name="
            f"{algorithm.policy_loss.name} trains on no samples of a policy; set it to 0"
        )


def _check_entropy_control(algorithm: AlgorithmConfig) -> None:
    section, control = "algorithm.entropy_control", algorithm.entropy_control
    if control.target is None:
        reject_unless_default(section, control, f"set {section}.target")
    elif is_supervised(algorithm):
        raise ConfigError(
            f"{section}.target={control.target}: algorithm.policy_loss.name={algorithm.policy_loss.name} does not "
            "explore; set it to null"
        )
    elif not control.minimum <= algorithm.entropy_coefficient <= control.maximum:
        raise ConfigError(
            f"algorithm.entropy_coefficient={algorithm.entropy_coefficient} must be between {section}.minimum="
            f"{control.minimum} and {section}.maximum={control.maximum}"
        )
    elif fixed := [entry for entry in algorithm.per_source if entry.entropy_coefficient is not None]:
        raise ConfigError(
            f"algorithm.per_source, {fixed[0].source}: entropy_coefficient={fixed[0].entropy_coefficient:g} has no "
            f"effect with {section}.target={control.target}, which sets one coefficient for all sources; remove one "
            "of them"
        )


def has_reference(config: Config) -> bool:
    """Return True if the run builds a reference: for KL terms, or for pairs of responses."""
    return uses_reference(config.algorithm) or compares_with_reference(config)


def check_reference(config: Config) -> None:
    """Raise ConfigError for a key that has no effect or that requires another key."""
    kl, reference = config.algorithm.kl, config.reference
    chosen = "algorithm.kl.controller=adaptive"
    if kl.controller != "adaptive":
        reject_unless_default("algorithm.kl", kl, f"set {chosen}", ("target", "horizon"))
    elif kl.in_reward <= 0:
        raise ConfigError(
            f"{chosen} multiplies algorithm.kl.in_reward={kl.in_reward}; set algorithm.kl.in_reward to an initial "
            "value above 0, or algorithm.kl.controller=fixed"
        )
    elif (unset := next((name for name in ("target", "horizon") if getattr(kl, name) is None), None)) is not None:
        raise ConfigError(f"{chosen} needs algorithm.kl.{unset} above 0, not null; set it")
    for use in ("loss", "reward"):
        key = f"algorithm.kl.in_{use}"
        if not (has_loss_kl(config.algorithm) if use == "loss" else kl.in_reward):
            keys = (f"{use}_kind", "unbiased") if use == "loss" else (f"{use}_kind",)
            reject_unless_default("algorithm.kl", kl, f"set {key} above 0", keys)
    if kl.unbiased and kl.loss_kind not in UNBIASED_KINDS:
        raise ConfigError(
            f"algorithm.kl.unbiased=true needs an estimator that is unbiased for tokens of the policy, not "
            f"algorithm.kl.loss_kind={kl.loss_kind}; set it to one of {', '.join(UNBIASED_KINDS)}"
        )
    if compares_with_reference(config):
        reject_unless_default(
            "reference",
            reference,
            "set trainer.objective=rl: pairs compare with a fixed reference",
            ["refresh_every_steps"],
        )
    elif not uses_reference(config.algorithm):
        reject_unless_default("reference", reference, no_reference(config))


def uses_reward_model(section: RewardModelConfig) -> bool:
    """Return True if a reward model on its own ranks scores responses."""
    return section.hf_path is not None


def check_reward_model(section: RewardModelConfig) -> None:
    """Raise ConfigError for a key of the reward model that has no effect."""
    if section.hf_path is None:
        reject_unless_default("reward_model", section, "set reward_model.hf_path")
    for key, value, default in changed("reward_model", section):
        name = key.removeprefix("reward_model.")
        if name not in FROZEN_MODEL_KEYS and not name.startswith("parallel."):
            raise ConfigError(
                f"{key}={value} has no effect: a reward model is not trained and predicts no tokens; leave it at "
                f"{default}"
            )
    if section.weight == 0:
        raise ConfigError(
            f"reward_model.weight={section.weight} must be a number other than 0; without a reward model set "
            "reward_model.hf_path to null"
        )


def check_reward_source(
    section: RewardModelConfig, judge: JudgeConfig, reward: RewardConfig, rollout: RolloutConfig
) -> None:
    """Raise ConfigError if no component gives rewards."""
    scored = uses_reward_model(section) or judge.hf_path is not None or judge.url is not None
    if reward.function == NO_RULE and not scored and not has_turns(rollout):
        raise ConfigError(
            "reward.function=none leaves responses without a reward; set reward_model.hf_path to a sequence "
            "classification checkpoint, judge.hf_path or judge.url to a model that judges, rollout.environment or "
            "rollout.episode to episodes that give rewards, reward.function to a rule, or teacher.alone=true to learn "
            "from teacher.hf_path without rewards"
        )


def check_graders(reward: RewardConfig, rollout: RolloutConfig) -> None:
    """Raise ConfigError for a key without effect and for contradictory keys."""
    if all(entry.function != BY_DATA_SOURCE for entry in reward.entries):
        reject_unless_default("reward", reward, f"set reward.function={BY_DATA_SOURCE}", ["functions"])
    # reward.weighted replaces these keys, so there is no setting with which they have an effect.
    if reward.weighted:
        for key, value, default in changed("reward", reward):
            if key == "reward.function" or key.startswith("reward.kwargs"):
                raise ConfigError(f"{key}={value} has no effect with reward.weighted; leave it at {default}")
    else:
        reject_unless_default("reward", reward, "set reward.weighted", ["accuracy_of"])
    _check_kwargs(reward)
    _check_manager(reward)
    # With reward.batch=step, all responses of a step must exist at the same time, and only the function grades them.
    chosen = f"reward.batch={STEP}"
    if reward.batch == STEP and rollout.max_staleness:
        raise ConfigError(
            f"{chosen} grades all responses of a step together, but with rollout.max_staleness="
            f"{rollout.max_staleness} each group is graded when it ends; set reward.batch={GROUP}, or "
            "rollout.max_staleness=0"
        )
    if reward.batch == STEP and has_turns(rollout):
        raise ConfigError(
            f"{chosen} supports single turns only, but rollout.episode={episode_of(rollout)}; set reward.batch={GROUP}"
        )


def _check_kwargs(reward: RewardConfig) -> None:
    """Reject arguments of built-in graders, which take none."""
    for number, entry in enumerate(reward.entries):
        # With by_data_source, the arguments go to the functions in reward.functions.
        given = reward.functions.values() if entry.function == BY_DATA_SOURCE else [entry.function]
        if entry.kwargs and not any(map(names_function, given)):
            key = f"reward.weighted[{number}].kwargs" if reward.weighted else "reward.kwargs"
            raise ConfigError(
                f"{key}={entry.kwargs} has no effect: {entry.function} takes no arguments; leave {key} at {{}}"
            )


def _check_manager(reward: RewardConfig) -> None:
    if reward.manager == NAIVE and reward.workers > 1:
        raise ConfigError(
            f"reward.manager={NAIVE} grades one response at a time, but reward.workers={reward.workers}; set "
            "reward.workers=1 or reward.manager=prime"
        )
    if reward.manager == NAIVE:
        reject_unless_default("reward", reward, "set reward.manager=prime", ["max_concurrent_calls"])
    if reward.manager == DAPO and reward.overlong.enable is False:
        raise ConfigError(
            f"reward.manager={DAPO} enables reward.overlong, but reward.overlong.enable=false; leave it at null, or "
            "set reward.manager=prime"
        )
    if reward.manager != BATCH:
        reject_unless_default("reward", reward, f"set reward.manager={BATCH}", ["batch"])
    # Built-in graders take one response per call.
    elif reward.weighted or not names_function(reward.function):
        raise ConfigError(
            f"reward.manager={BATCH} grades several responses per call, which {reward.chosen} does not support; set "
            "reward.function=module_or_file.py:function"
        )
