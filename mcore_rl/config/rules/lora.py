"""Rules for LoRA adapters."""

from __future__ import annotations

from operator import attrgetter

from mcore_rl.config.models import ActorConfig, LoraConfig, ReferenceConfig
from mcore_rl.config.rules.changed_keys import changed, reject_unless_default
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

UNSUPPORTED = {
    "model.random_init": "checkpoints contain adapters only, and the base model is read again from model.hf_path; set "
    "it to false",
    "actor.mtp_loss_coefficient": "PEFT's adapters have no names for multi-token-prediction layers; set it to 0",
    "actor.moe.bias_update_rate": "the bias belongs to the frozen weights; set it to 0",
    "actor.fp8": "models with adapters are built without TransformerEngine, which has the FP8 kernels; set it to none",
    "reference.refresh_every_steps": "the reference is the base model without adapters and cannot change; set it to 0",
}
"""Keys that adapters do not support, with the reason and the remedy."""


def uses_lora(actor: ActorConfig) -> bool:
    """Return True if adapters are trained instead of the weights."""
    return actor.lora.rank > 0


def base_is_reference(actor: ActorConfig, reference: ReferenceConfig) -> bool:
    """Return True if the base model of the adapters is the reference of the KL terms."""
    return uses_lora(actor) and reference.hf_path is None


def check_lora(config: Config) -> None:
    """Raise ConfigError for a key without effect, or one that adapters do not support."""
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
        value = attrgetter(key)(config)
        if value and value != "none":
            raise ConfigError(f"{key}={value} is not supported with actor.lora.rank={lora.rank}: {reason}")


def reject_suggestions(actor: ActorConfig) -> None:
    """Raise ConfigError if adapters are trained."""
    if uses_lora(actor):
        raise ConfigError(
            f"--suggest assumes gradients and optimizer state for all weights, but actor.lora.rank="
            f"{actor.lora.rank} trains only adapters; run plan on your own layout without --suggest, or set "
            "actor.lora.rank to 0 for layouts that fit with and without adapters"
        )


def check_no_critic_lora(lora: LoraConfig) -> None:
    """Raise ConfigError naming the key in section `critic`."""
    for key, value, default in changed("critic.lora", lora):
        raise ConfigError(
            f"{key}={value}: a critic is trained completely, since its value head starts random; leave {key} at "
            f"{default}"
        )
