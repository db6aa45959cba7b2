"""Operators that torchvision's wheel for CUDA needs beside a CPU build of torch.

The wheel registers kernels of operators that only its CUDA library declares, so its import fails without that library,
and so does the import of transformers and vLLM, which import it wherever it is installed. pyproject.toml registers
`declare` as an entry point of torch.backends: every process of the environment calls it at the end of `import torch`,
also vLLM's subprocess that inspects the class of a model, where nothing else of this project runs.
"""

from __future__ import annotations

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Schemas of torchvision 0.28 whose fake kernels are registered on import."""


def declare() -> None:
    """Declare the operators, unless torch is built for CUDA or they exist."""
    import torch

    # A build of torchvision for CPUs declares them itself, and declaring an operator twice is an error.
    if torch.version.cuda is not None or _declares_operators():
        return
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)


def _declares_operators() -> bool:
    """Return whether the installed torchvision declares the operators: it is a build for CPUs."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torchvision").endswith("+cpu")
    except PackageNotFoundError:
        return True  # nothing needs them
