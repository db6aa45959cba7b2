"""Preparation of prompts with images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_rl.config.rules.images import setting_without_images
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
    number, found = sum(map(bool, prompts.columns["images"])), setting_without_images(config)
    if number and found is not None:
        reason = f", but {found.reason}" if found.reason else ""
        raise ConfigError(f"{found.setting}: {number} prompts of {key} have images{reason}; {found.remedy}")
