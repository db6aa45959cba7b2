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
    """Return one entry per image of a prompt.

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

    grids = torch.from_numpy(images.grids).long()
    patches = grids.prod(dim=1)
    items = MultiModalKwargsItems.from_hf_inputs(
        BatchFeature({"pixel_values": torch.from_numpy(images.pixels), "image_grid_thw": grids}),
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", patches),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
    lengths = (patches // merge_size**2).tolist()
    return [
        MultiModalFeatureSpec(
            data=item,
            modality="image",
            identifier=f"{images.digest}.{number}, version {weight_version}",
            mm_position=PlaceholderRange(offset=start, length=length),
        )
        for number, (item, start, length) in enumerate(
            zip(items["image"], images.starts.tolist(), lengths, strict=True)
        )
    ]
