"""Images of requests, in the form that vLLM's scheduler and model runner receive from its own input processor.

The trainer's patches are used as they are: engine and trainer see the same numbers, and an image is processed once per
prompt, not once per response. vLLM takes the places and positions of images from these features and not from the token
ids, so placeholder tokens that the policy samples are ordinary tokens here, as in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mcore_rl.types import PromptImages

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def image_features(images: PromptImages, merge_size: int, weight_version: int) -> list[MultiModalFeatureSpec]:
    """Return one entry per image of a sequence.

    merge_size: rows and columns of patches that form one feature. weight_version: version of the weights that compute
    the features, part of their key in vLLM's caches.
    """
    from transformers import BatchFeature
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    features = []
    for image, start in zip(images.images, images.starts.tolist(), strict=True):
        grid = torch.from_numpy(image.grid[None]).long()
        # One image at a time, so that its pixels are not copied.
        items = MultiModalKwargsItems.from_hf_inputs(
            BatchFeature({"pixel_values": torch.from_numpy(image.pixels), "image_grid_thw": grid}),
            {
                "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(dim=1)),
                "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            },
        )
        features.append(
            MultiModalFeatureSpec(
                data=items["image"][0],
                modality="image",
                # The image's own checksum: a turn with more images finds the features and the prefix of this one.
                identifier=f"{image.digest}, version {weight_version}",
                mm_position=PlaceholderRange(offset=start, length=image.num_features(merge_size)),
            )
        )
    return features
