"""Activations of a vision tower, roughly.

Every token of a packed row counts as an image's feature, which is an upper bound: a feature takes merge_size squared
patches. A block of width h and intermediate width f saves, per patch, the inputs of both norms and of three
projections, q, k and v before and after rotation, and the output of attention (10 h in all), and three tensors of the
MLP (3 f). A trained tower runs again for its backward pass, so only one micro-batch of it is in memory.
"""

from __future__ import annotations

from mcore_rl.planner.layers.execution import Execution
from model_converters.families.parts.vision import VisionArguments


def tower_bytes(vision: VisionArguments, run: Execution, *, trained: bool) -> float:
    """Return the bytes of one pass: of all blocks if they save tensors for a backward pass, else of one block."""
    patches = run.row_tokens * vision.merge_size**2
    block = (10 * vision.hidden_size + 3 * vision.intermediate_size) * run.element_bytes
    pixels = vision.patch_values * run.element_bytes
    return patches * (pixels + block * (vision.depth if trained else 1))


def feature_bytes(vision: VisionArguments, run: Execution, hidden: int) -> float:
    """Return the bytes of the features of one micro-batch, which its forward pass keeps. hidden: of the decoder."""
    return run.row_tokens * hidden * run.element_bytes * (1 + vision.deepstack)
