"""Roles beside the actor: models that are built, run and trained by the same code from a section of their own."""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.models import CriticConfig, RewardModelConfig
from mcore_rl.config.schema import Config

Section = CriticConfig | RewardModelConfig


def as_actor(config: Config, section: Section) -> Config:
    """The configuration in which `section` stands where shared code looks for the actor, its checkpoint where that
    code looks for the model, and its epochs where it counts the updates of the run."""
    model, trainer = replace(config.model, hf_path=section.hf_path or config.model.hf_path), config.trainer
    if isinstance(section, CriticConfig):
        trainer = replace(trainer, update_epochs=trainer.update_epochs * section.update_epochs)
    return replace(config, actor=section, model=model, trainer=trainer)


def keys_of(section: Section) -> dict[str, str]:
    """Of a policy's keys -> of this role, for role_keys; model.hf_path stays itself where the role takes the policy's
    checkpoint."""
    role = "critic" if isinstance(section, CriticConfig) else "reward_model"
    path = {} if section.hf_path is None else {"model.hf_path": f"{role}.hf_path"}
    return {"actor": role, **path}
