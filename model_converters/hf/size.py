"""Whether a model is small enough to be run a second time, by transformers, only to be compared with."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from model_converters.hf.io import HFCheckpoint

COMPARED_PARAMETERS = 2 * 10**9
"""What is run twice unasked: some tens of seconds on a CPU."""
_COPIES = 3
"""Of the weights, in float32: transformers', megatron's, and what the reader holds on the way."""


def reason_not_to_compare(source: HFCheckpoint) -> str | None:
    """Why a model is not run a second time unless that is asked for; None: it is small."""
    parameters = sum(map(prod, source.shapes.values()))
    needed = _COPIES * torch.float32.itemsize * parameters
    if parameters > COMPARED_PARAMETERS:
        return f"the model has {parameters / 1e9:.1f} billion parameters"
    if needed > _available_bytes() / 2:
        return f"{needed / 2**30:.1f} GiB are more than half of the free memory"
    return None


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
