"""Rules for trainer.objective: the loss that it selects, and keys that have no effect with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mcore_rl.config.algorithm import PREFERENCE, SCORES, SUPERVISED, is_supervised
from mcore_rl.config.fields import Changed, changed, reject_unless_default
from mcore_rl.config.objectives import DPO, HINGE, IPO, PAIRED, REWARD_MODEL, RL, ROBUST, SFT
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

KEPT: dict[str, Collection[str]] = {
    "rollout": ("rollout.max_prompt_tokens", "rollout.max_response_tokens"),
    "algorithm": ("algorithm.policy_loss.name",),
    "reward": (),
    "judge": (),
    "sandbox": (),
    "reward_model": (),
    "critic": (),
    "weights": (),
}
"""Sections about responses, engines and rewards, with their keys that apply to texts of the data set too."""
SINGLE_KEYS = {
    "trainer": ("trainer.critic_warmup_steps",),
    "checkpoint": ("checkpoint.drain",),
    "observe": ("observe.keep_trajectories", "observe.token_responses"),
    "data": ("data.answer_key",),
}
"""Keys of other sections that concern generated responses or their ground truth."""
OWN_KEYS: dict[str, Collection[str]] = {
    SFT: ("algorithm.loss_aggregation", "data.answer_key"),
    DPO: (),
    REWARD_MODEL: (),
}
"""Keys of these sections that apply to one objective."""
OF_SCORES = ("center_rewards_coefficient",)
"""Keys of section preference that apply to reward models; the others apply to DPO."""
OF_TOKENS = {
    "actor": ("actor.logprob_chunk_tokens", "actor.quantization_aware", "actor.moe.router_replay"),
    "model": ("model.float32_head",),
    "trainer": ("trainer.export_adapter",),
}
"""Keys of models that predict tokens, which a reward model does not."""


def select_loss(config: Config) -> Config:
    """Set algorithm.policy_loss.name to the loss of trainer.objective, unless it names another one than the default,
    which check_objective rejects."""
    objective, section = config.trainer.objective, config.algorithm.policy_loss
    if objective in (SFT, *PAIRED) and section.name == type(section)().name:
        section.name = objective
    return config


def check_objective(config: Config) -> None:
    """Raise ConfigError for a key that has no effect with trainer.objective, or that contradicts it."""
    objective, loss = config.trainer.objective, config.algorithm.policy_loss.name
    chosen = f"trainer.objective={objective}"
    if objective == RL:
        if loss in (PREFERENCE, SCORES):
            raise ConfigError(f"algorithm.policy_loss.name={loss} needs trainer.objective={loss}; set that key")
        _check_preference(config)
        return
    _check_preference(config)
    for key, value, default in _without_effect(config):
        raise ConfigError(
            f"{key}={value} has no effect with {chosen}, which generates no responses; leave it at {default}"
        )
    if loss != objective:
        raise ConfigError(f"algorithm.policy_loss.name={loss} has no effect with {chosen}; remove it")
    _check_data(config, chosen)
    best = config.checkpoint.keep_best
    if objective == SFT and best > type(config.checkpoint)().keep_best:
        raise ConfigError(
            f"checkpoint.keep_best={best} has no effect with {chosen}, whose validation has no val/accuracy; raise "
            "checkpoint.keep_last, and leave it at 1 or 0"
        )
    if objective in PAIRED:
        _check_pairs(config, chosen)
    if objective == REWARD_MODEL:
        _check_scores(config, chosen)


def _check_preference(config: Config) -> None:
    """Reject keys of section preference that the objective or preference.loss does not have."""
    section, objective = config.preference, config.trainer.objective
    others = [name for name in vars(section) if name not in OF_SCORES]
    if objective != DPO:
        reject_unless_default("preference", section, f"set trainer.objective={DPO}", others)
    if objective != REWARD_MODEL:
        reject_unless_default("preference", section, f"set trainer.objective={REWARD_MODEL}", OF_SCORES)
    loss = f"preference.loss={section.loss}"
    if section.loss == ROBUST and not section.label_smoothing:
        raise ConfigError(
            f"{loss} needs the fraction of swapped labels: set preference.label_smoothing above 0, or preference.loss="
            "sigmoid"
        )
    without = {IPO: ("label_smoothing", "target_margin"), HINGE: ("label_smoothing",)}.get(section.loss, ())
    for key, value, default in changed("preference", section):
        if key.removeprefix("preference.") in without:
            raise ConfigError(f"{key}={value} has no effect with {loss}; leave it at {default}")


def _check_scores(config: Config, chosen: str) -> None:
    """Reject keys of models that predict tokens, and adapters beside sharded weights."""
    actor = config.actor
    if actor.lora.rank and actor.shards_parameters:
        raise ConfigError(
            f"actor.lora.rank={actor.lora.rank} is not supported with {chosen} and sharded parameters, because the "
            "value head is trained beside the adapters; set actor.lora.rank=0, or actor.strategy=megatron and "
            "actor.parallel.shard_parameters=false"
        )
    if config.model.check_logits == "always":
        raise ConfigError(
            f"model.check_logits=always compares log-probabilities, but with {chosen} the model predicts no tokens; "
            "set it to auto"
        )
    for section, names in OF_TOKENS.items():
        for key, value, default in changed(section, getattr(config, section)):
            if key in names:
                raise ConfigError(
                    f"{key}={value} has no effect with {chosen}, whose model has a value head and predicts no tokens; "
                    f"leave it at {default}"
                )


def _without_effect(config: Config) -> Iterator[Changed]:
    own = OWN_KEYS[config.trainer.objective]
    for section, kept in KEPT.items():
        found = changed(section, getattr(config, section))
        yield from (each for each in found if each.key not in kept and each.key not in own)
    for section, names in SINGLE_KEYS.items():
        found = changed(section, getattr(config, section))
        yield from (each for each in found if each.key in names and each.key not in own)


def _check_data(config: Config, chosen: str) -> None:
    data = config.data
    if data.long_prompts != "drop":
        raise ConfigError(
            f"data.long_prompts={data.long_prompts}: a trained text does not fit a truncated prompt; set "
            f"data.long_prompts=drop with {chosen}"
        )
    if data.cache_dir is not None:
        raise ConfigError(f"data.cache_dir={data.cache_dir} is not supported with {chosen}; set it to null")


def _check_pairs(config: Config, chosen: str) -> None:
    trainer = config.trainer
    if trainer.prompts_per_update != trainer.prompts_per_step or trainer.update_epochs != 1:
        raise ConfigError(
            f"{chosen} has one update per step, but trainer.prompts_per_step={trainer.prompts_per_step}, "
            f"trainer.prompts_per_update={trainer.prompts_per_update}, trainer.update_epochs={trainer.update_epochs}: "
            "the weights of the pairs belong to the policy before the update; set the first two to the same number of "
            "pairs, and trainer.update_epochs=1"
        )
    if config.actor.mtp_loss_coefficient:
        raise ConfigError(
            f"actor.mtp_loss_coefficient={config.actor.mtp_loss_coefficient} would train multi-token-prediction layers "
            f"on rejected responses with {chosen}; set it to 0"
        )


def check_pairs_per_update(config: Config, data_ranks: int) -> None:
    """Require a response for every data-parallel rank in each update of a run on pairs.

    Raises: ConfigError.
    """
    pairs = config.trainer.prompts_per_update
    if config.trainer.objective in PAIRED and 2 * pairs < data_ranks:
        raise ConfigError(
            f"trainer.prompts_per_update={pairs} pairs have 2 responses each, fewer than the {data_ranks} "
            "data-parallel ranks; raise it"
        )


def compares_with_reference(config: Config) -> bool:
    """Return True if the rewards of pairs are relative to a reference."""
    return config.trainer.objective == DPO and not config.preference.reference_free


def no_reference(config: Config) -> str:
    """Return the remedy for a key of the reference in a run without one."""
    if config.trainer.objective == DPO:
        return "set preference.reference_free=false"
    if config.trainer.objective == REWARD_MODEL:
        return f"trainer.objective={REWARD_MODEL} has no reference: set trainer.objective={DPO}"
    return "set algorithm.kl.in_loss or algorithm.kl.in_reward above 0"


def responses_per_prompt(config: Config) -> int:
    """Return the number of responses with which each prompt is trained."""
    if config.trainer.objective in PAIRED:
        return 2
    return 1 if is_supervised(config.algorithm) else config.rollout.samples_per_prompt


def trains_scores(config: Config) -> bool:
    """Return True if the actor is a reward model: a model with a value head, which predicts no tokens."""
    return config.trainer.objective == REWARD_MODEL


def is_warm_start(config: Config) -> bool:
    """Return True for supervised training on data.answer_key (algorithm.policy_loss.name=sft), which does not
    validate."""
    return config.trainer.objective == RL and config.algorithm.policy_loss.name == SUPERVISED


def chosen_objective(config: Config) -> str:
    """Return the setting that selects the objective, for messages: `key=value`."""
    if config.trainer.objective != RL:
        return f"trainer.objective={config.trainer.objective}"
    return f"algorithm.policy_loss.name={config.algorithm.policy_loss.name}"
