"""Quantisation of rollouts, and the FP8 recipes of training with the quantisations that engines may use beside them."""

from __future__ import annotations

from dataclasses import dataclass

UNQUANTIZED, FP8, INT4 = "none", "fp8", "int4"
QUANTIZATIONS = (UNQUANTIZED, FP8, INT4)
"""Values of rollout.quantization."""
BLOCK = 128
"""Rows and columns of a block of weights with one scale in rollout.quantization=fp8."""
GROUPS = (32, 128)
"""Values of rollout.quantization_group: elements of a row of an expert's matrix with one scale in int4."""
BLOCK_SCALES = f"one scale per block of {BLOCK} x {BLOCK}"


@dataclass(frozen=True)
class Fp8Recipe:
    """FP8 recipe of a trained model (actor.fp8). `scales` describes the scales of its weights; `rollouts` are the
    values of rollout.quantization, besides none, that round weights in the same way."""

    scales: str
    rollouts: tuple[str, ...] = ()


FP8_RECIPES = {
    "delayed": Fp8Recipe("one scale per tensor, from earlier steps"),
    "tensorwise": Fp8Recipe("one scale per tensor"),
    "blockwise": Fp8Recipe(BLOCK_SCALES, rollouts=(FP8,)),
    "mxfp8": Fp8Recipe("one scale per 32 elements of a row"),
}
"""Values of actor.fp8 besides none. Each pair with a value of rollout.quantization is accepted or rejected by this
table."""
