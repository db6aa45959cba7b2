"""Parts of HF tensors that a vLLM rank keeps, recorded from its loaders. Checked with vLLM 0.32.

The loaders write parameters in the checkpoint format, which a layer-wise reload restores temporarily.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from mcore_rl.engines.kept_slices import KeptSlice, TensorSpec, record, storage_key


@torch.no_grad()
def record_kept_slices(model: torch.nn.Module, specs: Iterable[TensorSpec]) -> list[KeptSlice]:
    """See engines.kept_slices.record. No reload may be in progress."""
    initialize_layerwise_reload(model)  # parameters in the checkpoint format, on meta
    try:
        places: dict[int, tuple[str, str]] = {}
        for name, module in model.named_modules():
            for parameter, tensor in get_layer_tensors(module).items():
                places.setdefault(storage_key(tensor), (name, parameter))
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = _get_original_loader(tensor)  # without counting and building kernels
        return record(model, places, specs, "vLLM")
    finally:
        discard_reload(model)


def discard_reload(model: torch.nn.Module) -> None:
    """Cancel an unfinished reload. Kernels keep their earlier weights, except in modules that were complete.

    Unlike vLLM's own end of a reload, this does not convert incomplete layers to the kernels' format: their weights are
    of two versions or uninitialised.
    """
    model._do_torchao_reload = getattr(model, "_original_do_torchao_reload", False)
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
