"""Detection of experts fused into one tensor per layer: the in-memory format of transformers 5, saved on request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from model_converters.errors import ConversionError
from model_converters.hf.shards import StoredTensor

_FUSED = re.compile(r".*\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight|_bias)?")


def refuse_fused_experts(stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Reject directories with fused experts.

    Raises: ConversionError naming the first such tensor.
    """
    fused = [name for name in stored if _FUSED.fullmatch(name)]
    if fused:
        shape = list(stored[fused[0]].shape)
        raise ConversionError(
            f"{directory}: {fused[0]} {shape} and {len(fused) - 1} more tensors hold all experts of a layer; only one "
            "tensor per expert is supported: save the model with save_pretrained(..., save_original_format=True)"
        )
