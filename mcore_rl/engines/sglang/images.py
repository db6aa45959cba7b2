"""Images of requests, in the form in which SGLang's scheduler receives them from its own processor (runs in SGLang's
environment). Checked with SGLang 0.5.23.

The trainer's patches and positions are used as they are, so engine and trainer see the same numbers. SGLang finds
features by their places, and replaces their placeholder tokens by a key of the image. Placeholder tokens that the
policy samples are ordinary tokens here, as in training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from mcore_rl.types import PromptImages
from mcore_rl.vision.positions import token_positions

_KEY_BYTES = 32


@dataclass(frozen=True)
class ImageInputs:
    """Converts images for one model. merge_size: rows and columns of patches that form one feature. image_token: id of
    the placeholder of a feature."""

    merge_size: int
    image_token: int

    @classmethod
    def of(cls, config: ModelConfig) -> ImageInputs | None:
        """Return the inputs of a model; None if it has no vision tower."""
        vision = getattr(config.hf_config, "vision_config", None)
        return None if vision is None else cls(vision.spatial_merge_size, config.hf_config.image_token_id)

    def of_request(self, images: PromptImages, num_tokens: int, salt: str) -> MultimodalProcessorOutput:
        """Return the images of a sequence.

        num_tokens: largest number of tokens of the sequence with its response. A request that is retracted computes its
        response again, with these positions.
        salt: names the weights that compute the features, part of their key in SGLang's caches.
        """
        items = []
        for image, start in zip(images.images, images.starts.tolist(), strict=True):
            grid = torch.from_numpy(image.grid[None]).long()
            item = MultimodalDataItem(
                modality=Modality.IMAGE,
                feature=torch.from_numpy(image.pixels),
                offsets=[(start, start + image.num_features(self.merge_size) - 1)],  # first and last placeholder
                model_specific_data={"image_grid_thw": grid},
            )
            item.set_identity(hashlib.blake2b(f"{image.digest} {salt}".encode(), digest_size=_KEY_BYTES).digest())
            items.append(item)
        positions = torch.from_numpy(token_positions(num_tokens, images, self.merge_size)).long()
        # Distance of a response's positions from its indices.
        delta = positions[0, -1] - (num_tokens - 1)
        return MultimodalProcessorOutput(
            mm_items=items,
            im_token_id=self.image_token,
            mrope_positions=positions,
            mrope_position_delta=delta.reshape(1, 1),
        )


def forget_features() -> None:
    """Empty the cache of features, which earlier weights of the tower have computed."""
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def accept_current_names() -> None:
    """Let SGLang's loader of Qwen2.5-VL accept transformers 5's names of the tower and the decoder, as its loaders of
    other models do. Call once in a process."""
    load = Qwen2_5_VLForConditionalGeneration.load_weights

    def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return load(model, ((_earlier_name(name), tensor) for name, tensor in weights))

    Qwen2_5_VLForConditionalGeneration.load_weights = load_weights


def _earlier_name(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
