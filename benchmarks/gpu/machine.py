"""GPU of this machine and its specified peak performance."""

from __future__ import annotations

import torch

from benchmarks.result import NO_GPU, SkippedError

STATED_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "H800": 989, "A100": 312, "B200": 2250}
"""Peak of dense bfloat16 products by a part of the device's name; the first match counts. Source: NVIDIA's data
sheets."""


def require(device: str) -> None:
    """Check that the device exists. Raises: SkippedError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SkippedError(NO_GPU)


def stated_flops(device: str) -> float | None:
    """Return the specified FLOP per second; None for a device that is not in the table."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()  # such as NVIDIA H100 80GB HBM3
    return next((1e12 * tflops for part, tflops in STATED_TFLOPS.items() if part in name), None)
