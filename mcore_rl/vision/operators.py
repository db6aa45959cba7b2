"""Import of torchvision's wheel for CUDA beside a CPU build of torch.

The wheel registers kernels of operators that only its own CUDA library declares. Wherever torchvision is installed,
transformers imports it with models that read images, and so do inference engines.
"""

from __future__ import annotations

import torch

_TORCHVISION = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Schemas of torchvision 0.28 whose fake kernels are registered on import."""


def declare_operators() -> None:
    """Declare the operators that torchvision needs; call it before torchvision is imported."""
    if torch.version.cuda is not None:
        return
    for name, schema in _TORCHVISION.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
