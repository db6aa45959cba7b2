"""Size limits of the logit comparison, which runs a model a second time in transformers."""

from __future__ import annotations

from math import prod

import psutil
import torch

from model_converters.hf.io import HFCheckpoint

COMPARED_PARAMETERS = 2 * 10**9
"""Largest model that is compared by default; the comparison takes some tens of seconds on a CPU."""
_COPIES = 3
"""Float32 copies of the weights during the comparison: transformers, Megatron, and the reader's buffers."""


def reason_not_to_compare(source: HFCheckpoint) -> str | None:
    """Return the reason why a model is not compared by default, or None if it is small enough."""
    parameters = sum(map(prod, source.shapes.values()))
    needed = _COPIES * torch.float32.itemsize * parameters
    if parameters > COMPARED_PARAMETERS:
        return f"the model has {parameters / 1e9:.1f} billion parameters"
    # Half of it, as a margin for other processes.
    if needed > psutil.virtual_memory().available / 2:
        return f"the comparison needs {needed / 2**30:.1f} GiB, more than half of the free memory"
    return None
