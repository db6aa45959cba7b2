"""Images of packed rows: which features belong to which tokens, and which tokens are observations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoint import IMAGE_TOKEN, tiny_fields

from mcore_rl.errors import DataError
from mcore_rl.megatron.model.attention.context import SINGLE_RANK, ContextPart
from mcore_rl.megatron.step.images import image_inputs
from mcore_rl.megatron.step.microbatches import Packing, build_microbatches
from mcore_rl.types import NOT_SAMPLED, PromptImages, RankShare, TrajectoryBuffers
from model_converters.families import family_for

FIELDS = tiny_fields("qwen3_vl")
VISION = family_for(FIELDS).model_arguments(FIELDS).vision
# An image of 2 x 3 features behind two tokens; the second token of the response is a placeholder without an image.
TOKENS = np.array([1, 2, *[IMAGE_TOKEN] * 6, 3, 4, IMAGE_TOKEN, 5])
IMAGES = PromptImages.of(np.zeros((24, 96), np.float32), np.array([[1, 4, 6]], np.int32), np.array([2], np.int32))
OTHER = PromptImages.of(np.zeros((4, 96), np.float32), np.array([[1, 2, 2]], np.int32), np.array([2], np.int32))
CUT = replace(IMAGES, images=(replace(IMAGES.images[0], pixels=IMAGES.pixels[:-1]),))


def _row(part: ContextPart = SINGLE_RANK) -> Any:
    """A row of the prompt with two responses, another prompt, text, and padding."""
    other = np.array([7, 7, IMAGE_TOKEN, 8])
    sequences = [TOKENS, other, TOKENS[:-1], np.array([1, 2, 3])]
    lengths = [-(-len(tokens) // part.multiple) * part.multiple for tokens in sequences]
    return image_inputs(sequences, [IMAGES, OTHER, IMAGES, None], [*lengths, part.multiple], VISION, part)


def test_images_of_equal_prompts_are_computed_once() -> None:
    positions, images = _row()
    assert images.grids.tolist() == [[1, 4, 6], [1, 2, 2]]
    assert [len(pixels) for pixels in images.pixels] == [24, 4]
    # Two sequences read features 0..5, and one reads feature 6. Sampled placeholders read none.
    assert images.sources.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert images.places.tolist() == [2, 3, 4, 5, 6, 7, 14, 18, 19, 20, 21, 22, 23]
    # The image has 3 columns, so the text behind it continues at 2 + 3.
    assert positions[:, :12].tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert positions.shape == (3, 31)


def test_context_parallel_ranks_divide_the_placeholders() -> None:
    parts = [ContextPart(rank, 2) for rank in range(2)]
    whole_positions, _ = _row(parts[0])
    lengths = torch.tensor([12, 4, 12, 4, 4])
    found = []
    for part in parts:
        positions, images = _row(part)
        # All ranks have the positions of the whole row.
        np.testing.assert_array_equal(positions, whole_positions)
        places = part.row_indices(lengths)[images.places]
        found += list(zip(places.tolist(), images.sources.tolist(), strict=True))
    assert sorted(found) == [
        *((2 + i, i) for i in range(6)),
        (14, 6),
        *((18 + i, i) for i in range(6)),
    ]


def test_image_of_a_tool_answer_leaves_the_prompt_shared() -> None:
    """One response to the prompt calls a tool, which answers with an image that another prompt has too."""
    answered = np.array([*TOKENS, 3, IMAGE_TOKEN, 6, 6])
    after = IMAGES.followed_by(OTHER.images, [13])
    other = np.array([7, 7, IMAGE_TOKEN, 8])
    sequences = [TOKENS, answered, other]
    positions, images = image_inputs(sequences, [IMAGES, after, OTHER], [12, 16, 4], VISION, SINGLE_RANK)
    assert positions is not None
    assert images is not None
    assert images.grids.tolist() == [[1, 4, 6], [1, 2, 2]]
    assert images.sources.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 6]
    assert images.places.tolist() == [2, 3, 4, 5, 6, 7, 14, 15, 16, 17, 18, 19, 25, 30]
    # The sampled placeholder and the image of the answer each take one position.
    assert positions[:, 20:28].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]] * 3


def test_placeholders_of_a_tool_answer_are_no_observations() -> None:
    """The policy samples token 3, a tool answers 4, an image of 6 features and 5, and the policy samples 6."""
    response = np.array([3, 4, *[IMAGE_TOKEN] * 6, 5, 6], np.int32)
    sampled = np.isin(response, [3, 6])
    buffers = TrajectoryBuffers(
        tokens=np.concatenate([np.array([1, 2], np.int32), response]),
        token_offsets=np.array([0, 2 + len(response)]),
        prompt_tokens=np.array([2], np.int32),
        response_offsets=np.array([0, len(response)]),
        logp_rollout=np.zeros(len(response), np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        trained=sampled.astype(np.uint8),
        images=(replace(IMAGES, starts=np.array([4], np.int32)),),
        image_rows=np.array([0], np.int32),
    )
    first, one = np.array([0]), np.array([1], np.float32)
    share = RankShare(first, first, first, first[None], np.array([12]), one, one, one, observation_weights=one)
    [batch] = build_microbatches(share, [buffers], Packing(tokens=20, vision=VISION, observed=True))
    assert batch.observations is not None
    assert batch.observations.targets.tolist() == [4, 5]
    assert batch.observations.predictors.tolist() == [2, 9]
    assert batch.observations.weights.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("images", "vision", "message"),
    [
        (IMAGES, None, "the model has no vision tower"),
        (replace(IMAGES, starts=np.array([3], np.int32)), VISION, "are not image_token_id 90"),
        (CUT, VISION, r"pixels have shape \[23, 96\].*need \[24, 96\]"),
    ],
)
def test_images_that_do_not_fit_are_rejected(images: PromptImages, vision: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        image_inputs([TOKENS], [images], [len(TOKENS)], vision, SINGLE_RANK)
