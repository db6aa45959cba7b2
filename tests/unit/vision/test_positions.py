"""Positions of tokens and features, compared with transformers for random layouts of text and images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoint import IMAGE_TOKEN, tiny_model

from mcore_rl.types import PromptImages
from mcore_rl.vision.positions import placeholders, token_positions


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, num_hidden_layers=1).model


def _random_prompt(generator: np.random.Generator) -> tuple[np.ndarray, PromptImages]:
    tokens: list[int] = []
    grids, starts = [], []
    for _ in range(generator.integers(1, 4)):
        tokens += [1] * int(generator.integers(1, 6))
        grid = (1, *(2 * generator.integers(1, 6, 2)))
        starts.append(len(tokens))
        grids.append(grid)
        tokens += [IMAGE_TOKEN] * int(grid[1] * grid[2] // 4)
    tokens += [1] * int(generator.integers(0, 9))
    empty = np.empty((0, 96), np.float32)
    return np.array(tokens), PromptImages.of(empty, np.array(grids, np.int32), np.array(starts, np.int32))


@pytest.mark.parametrize("seed", range(8))
def test_token_positions_equal_transformers(model: Any, seed: int) -> None:
    tokens, images = _random_prompt(np.random.default_rng(seed))
    is_image = tokens == IMAGE_TOKEN
    expected, _ = model.get_rope_index(
        torch.from_numpy(tokens)[None],
        mm_token_type_ids=torch.from_numpy(is_image.astype(np.int32))[None],
        image_grid_thw=torch.from_numpy(images.grids.astype(np.int64)),
    )
    np.testing.assert_array_equal(token_positions(len(tokens), images, 2), expected[:, 0].numpy())
    np.testing.assert_array_equal(placeholders(images, 2), np.flatnonzero(is_image))
    # A response continues the text, and a shorter sequence has the same first positions.
    longer = token_positions(len(tokens) + 3, images, 2)
    np.testing.assert_array_equal(
        longer[:, len(tokens) :], expected[:, 0].numpy().max() + 1 + np.tile(range(3), (3, 1))
    )
    np.testing.assert_array_equal(token_positions(2, images, 2), longer[:, :2])


def test_token_positions_without_images_are_indices() -> None:
    np.testing.assert_array_equal(token_positions(4, None, 2), np.tile(range(4), (3, 1)))
