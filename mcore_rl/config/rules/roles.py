"""Roles beside the actor: models that are built, run and trained by the same code from a section of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mcore_rl.config.models import CriticConfig, RewardModelConfig
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

Section = CriticConfig | RewardModelConfig


def as_actor(config: Config, section: Section) -> Config:
    """The configuration in which `section` stands where shared code looks for the actor, its checkpoint where that
    code looks for the model, and its epochs where it counts the updates of the run."""
    model, trainer = replace(config.model, hf_path=section.hf_path or config.model.hf_path), config.trainer
    if isinstance(section, CriticConfig):
        trainer = replace(trainer, update_epochs=trainer.update_epochs * section.update_epochs)
    return replace(config, actor=section, model=model, trainer=trainer)


@contextmanager
def named_as(role: str, section: Section) -> Iterator[None]:
    """Within the block a ConfigError, whose message is of the actor's keys, names those of the role.

    Raises: ConfigError.
    """
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"\bactor\.", f"{role}.", str(error))
        if section.hf_path is not None:
            message = message.replace("model.hf_path", f"{role}.hf_path")
        raise type(error)(message) from error
