"""Vision tower: transformers' module, and its features of the images of a packed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.megatron.model.attention.packed import upload
from model_converters.families.parts.vision import VisionArguments


@dataclass(frozen=True)
class RowImages:
    """Images of the prompts in a packed row. Equal images of several prompts are listed once.

    pixels: patches of each prompt, on the host; see PromptImages.
    sources, places: feature and token of this rank's row of each placeholder; without context parallelism these are all
        placeholders of the row.

    Shapes: pixels float32 [patches, values of a patch] each; grids int64 [images, 3], on the host; sources, places
    int64 [N].
    """

    pixels: tuple[torch.Tensor, ...]
    grids: torch.Tensor
    sources: torch.Tensor
    places: torch.Tensor

    def on(self, device: torch.device | str) -> RowImages:
        """Return the same images with indices on `device`; the pixels follow when the tower runs."""
        return replace(self, sources=upload(self.sources, device), places=upload(self.places, device))


def build_tower(vision: VisionArguments, config: TransformerConfig, *, initialized: bool) -> torch.nn.Module:
    """Build the tower on torch's default device, in the model's dtype. Weights are undefined unless `initialized`."""
    # Imported here: loading transformers takes seconds.
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    fields = AutoConfig.for_model(**vision.config)
    options = {"dtype": config.params_dtype, "attn_implementation": "sdpa"}
    if initialized:
        return AutoModel.from_config(fields, **options)
    with no_init_weights():
        return AutoModel.from_config(fields, **options)


def run_tower(tower: torch.nn.Module, images: RowImages) -> list[torch.Tensor]:
    """Compute the features of all images, followed by the deepstack features.

    Shapes: -> [features, h] each.
    """
    weight = next(tower.parameters())
    pixels = torch.cat(images.pixels).to(weight.device, weight.dtype)
    found = tower(pixels, grid_thw=images.grids.to(weight.device), return_dict=True)
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]


class TowerGradient:
    """Backward pass of the tower, as soon as the gradients of all its features are complete.

    The decoder reads `leaves`, copies of the features without a graph. Otherwise every recomputed layer that adds
    deepstack features would run a backward pass through the tower, and the second one would fail. The tower is run a
    second time for its backward pass, so that no activations of it are kept meanwhile.
    """

    def __init__(self, tower: torch.nn.Module, images: RowImages, features: Sequence[torch.Tensor]) -> None:
        self._tower, self._images = tower, images
        self.leaves = [feature.detach().requires_grad_() for feature in features]
        self._missing = len(self.leaves)
        for leaf in self.leaves:
            leaf.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, leaf: torch.Tensor) -> None:
        self._missing -= 1
        if self._missing:
            return
        gradients = [leaf.grad for leaf in self.leaves]
        with torch.enable_grad():
            torch.autograd.backward(run_tower(self._tower, self._images), gradients)
        for leaf in self.leaves:
            leaf.grad = None
