"""Import of torchvision's wheel for CUDA beside a CPU build of torch.

The wheel registers kernels of operators that only its own CUDA library declares, so its import fails without that
library, and so does the import of transformers and vLLM, which import it wherever it is installed. pyproject.toml
registers `declare_operators` as an entry point of torch.backends: every process of the environment calls it at the end
of `import torch`, also vLLM's subprocess that inspects the class of a model, where nothing else of this project runs.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_TORCHVISION = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Schemas of torchvision 0.28 whose fake kernels are registered on import."""


def declare_operators() -> None:
    """Declare the operators that torchvision needs; call it before torchvision is imported."""
    # Not at the top: torch loads this module while it is imported, and would find it half-loaded if it came first.
    import torch

    if torch.version.cuda is not None or _declares_operators():
        return
    for name, schema in _TORCHVISION.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)


def _declares_operators() -> bool:
    """Return whether torchvision is a build for CPUs, which declares the operators itself, or is not installed."""
    try:
        return version("torchvision").endswith("+cpu")
    except PackageNotFoundError:
        return True
