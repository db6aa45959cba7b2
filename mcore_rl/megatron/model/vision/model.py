"""GPTModel with a vision tower on its first stage.

The features of images take the place of the embeddings of placeholder tokens. Deepstack features are added to the same
tokens behind the first decoder layers. Tensor-parallel ranks compute the same features. With sequence parallelism each
takes the features of its own tokens, and their gradients are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from megatron.core import tensor_parallel

from mcore_rl.megatron.model.attention.packed import PackedRow, upload
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.vision.tower import RowImages, TowerGradient, run_tower


@dataclass
class DeepstackRow(PackedRow):
    """A packed row with deepstack features of its images, one tensor per layer. A layer that is recomputed in a
    backward pass reads them again.

    Shapes: features [N, h]; places int64 [N], tokens of this tensor-parallel rank.
    """

    features: tuple[torch.Tensor, ...] = ()
    places: torch.Tensor | None = None


class VisionPolicy(PolicyModel):
    """A PolicyModel whose first stage has transformers' tower as `vision`, and whose rotation is a SectionedRotation.

    The tower is trained if its parameters require gradients.
    """

    vision: torch.nn.Module

    def add_tower(self, tower: torch.nn.Module, deepstack: int) -> None:
        """Add the tower; call once. `deepstack` layers, which this stage must have, get features."""
        self.vision = tower
        for index, layer in enumerate(self.decoder.layers[:deepstack]):
            layer.register_forward_hook(_Adder(index), with_kwargs=True)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: None,
        *,
        packed_seq_params: PackedRow,
        images: RowImages | None = None,
        **options: object,
    ) -> torch.Tensor:
        """Run the stage; see PolicyModel.

        Shapes: input_ids int64 [1, T]; position_ids int32 [3, T of the whole row], on all stages; None for a row
        without images. `images` are read on the first stage only.
        """
        if position_ids is None:
            position_ids = text_positions(packed_seq_params.lengths, input_ids.device)
        if self.pre_process and images is not None:
            features = self._features(images)
            embedded = self.embedding(input_ids=input_ids, position_ids=None)
            places, (merged, *deepstack) = self._own(images, features, len(embedded))
            options["decoder_input"] = embedded.index_put((places,), merged[:, None].to(embedded.dtype))
            plain = {field.name: getattr(packed_seq_params, field.name) for field in fields(packed_seq_params)}
            packed_seq_params = DeepstackRow(**plain, features=tuple(deepstack), places=places)
        return super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, **options)

    def _features(self, images: RowImages) -> list[torch.Tensor]:
        with torch.no_grad():
            features = run_tower(self.vision, images)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.vision.parameters())
        return TowerGradient(self.vision, images, features).leaves if trained else features

    def _own(
        self, images: RowImages, features: list[torch.Tensor], num_tokens: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the places of this tensor-parallel rank's placeholders among its tokens, and their features."""
        places, sources = images.places, images.sources
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            places = places - group.rank() * num_tokens
            inside = (places >= 0) & (places < num_tokens)
            places, sources = places[inside], sources[inside]
            features = [tensor_parallel.copy_to_tensor_model_parallel_region(x, group=group) for x in features]
        return places, [feature.index_select(0, sources) for feature in features]


class _Adder:
    """Forward hook that adds the deepstack features of one layer to its output."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __call__(
        self,
        layer: torch.nn.Module,
        inputs: tuple[object, ...],
        options: dict[str, object],
        output: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        row = options["packed_seq_params"]
        if not isinstance(row, DeepstackRow):
            return output
        assert row.places is not None
        hidden, *rest = output
        return (hidden.index_add(0, row.places, row.features[self._index][:, None].to(hidden.dtype)), *rest)


def set_trained(chunks: Iterable[torch.nn.Module], train: bool) -> None:
    """Train or freeze the vision tower of a model, if it has one. `chunks` are bare models."""
    for chunk in chunks:
        if isinstance(chunk, VisionPolicy) and chunk.pre_process:
            chunk.vision.requires_grad_(train)


def text_positions(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the positions of sequences without images. Shapes: -> int32 [3, sum of lengths]."""
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    return upload(positions.expand(3, -1).contiguous(), device)
