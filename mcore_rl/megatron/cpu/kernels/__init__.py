"""Single-pass CPU kernels; eager torch would read memory once per operation.

They correspond to TransformerEngine's fused kernels on a GPU, in float32 and float64, compiled by numba for one core,
because a rank has one core. Tests compare them with the torch operations that they replace.
"""

import torch


def supports(tensor: torch.Tensor) -> bool:
    """Return whether the kernels support the tensor's dtype (numpy has no bfloat16)."""
    return tensor.dtype in (torch.float32, torch.float64)
