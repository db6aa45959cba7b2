"""Observations in a micro-batch: tokens between the turns of an episode, such as results of tools, that the policy may
be trained to predict.

A token of a response is an observation if it was not sampled (its version is NOT_SAMPLED). A sampled token that the
episode does not train is none. Placeholders of images are none: they stand for features, not for text. Tokens after the
last trained token of a response are not computed (see microbatches.py), so they are no observations either. The prompt
of a sequence has none, even if it contains results of earlier turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mcore_rl.data.trajectories import images_of
from mcore_rl.types import NOT_SAMPLED, TrajectoryBuffers
from mcore_rl.vision.positions import placeholders
from model_converters.families.parts.vision import VisionArguments


@dataclass(frozen=True)
class Observations:
    """The observations of a micro-batch on this rank, in the form of its trained tokens.

    weights: observation weight of the response (see Batch) / (its observations on all context-parallel ranks).
    Shapes: predictors, targets int64 [M], weights float32 [M].
    """

    predictors: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def observation_predictors(
    buffers: TrajectoryBuffers, row: int, computed: int, vision: VisionArguments | None
) -> np.ndarray:
    """Return the positions of a trajectory that predict an observation, int64 [m]. computed: number of tokens that are
    computed; a target is one of them. vision: needed if the trajectory has images."""
    response = slice(int(buffers.response_offsets[row]), int(buffers.response_offsets[row + 1]))
    targets = int(buffers.prompt_tokens[row]) + np.flatnonzero(buffers.versions[response] == NOT_SAMPLED)
    targets = targets[targets < computed]
    if (images := images_of(buffers, row)) is not None:
        assert vision is not None  # image_inputs rejects images of a model without vision tower
        targets = np.setdiff1d(targets, placeholders(images, vision.merge_size))
    predictors: np.ndarray = targets - 1
    return predictors
