"""Preparation of prompts with images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.rules.rollout import has_turns
from mcore_rl.config.sampling import NO_DRAFTS
from mcore_rl.config.schema import Config
from mcore_rl.data.prompts import PromptSet
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.vision.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def image_processor(config: Config, spec: ResolvedModel, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """Return the image processor of a model with a vision tower, None for another model."""
    if spec.arguments.vision is None:
        return None
    return ImageProcessor.load(config.model.hf_path, tokenizer, "model.hf_path")


def check_images(config: Config, key: str, prompts: PromptSet) -> None:
    """Reject settings that prompts with images do not support. key: data key of the prompts.

    Raises: ConfigError.
    """
    rollout, number = config.rollout, sum(map(bool, prompts.columns["images"]))
    if not number:
        return
    found = f"{number} prompts of {key} have images"
    if rollout.engine != "vllm":
        raise ConfigError(f"rollout.engine={rollout.engine}: {found}; set it to vllm")
    if rollout.draft != NO_DRAFTS:
        raise ConfigError(f"rollout.draft={rollout.draft}: {found}; set it to none")
    if uses_reward_model(config.reward_model):
        raise ConfigError(f"reward_model.hf_path: {found}, but reward models read texts; set it to null")
    first_only = f"{found}, which only the first sequence of an episode contains"
    if has_turns(rollout) and rollout.long_history == "drop_turns":
        raise ConfigError(f"rollout.long_history=drop_turns: {first_only}; set it to end")
    if has_turns(rollout) and rollout.history == "new_sequence":
        raise ConfigError(f"rollout.history=new_sequence: {first_only}; set it to keep")
