"""Loads received boxes of HF tensors into a vLLM rank. Checked with vLLM 0.32.

The places of the boxes are recorded from vLLM's loaders, which write parameters in the checkpoint format; a layer-wise
reload restores this format temporarily.
Each box is copied directly to its recorded places in the parameters, which have the checkpoint format during an update.
When a module is complete, vLLM converts it to the format of its kernels. Not checked on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

from mcore_rl.engines.kept_slices import KeptSlice, PendingSlices, TensorSpec, record, storage_key
from mcore_rl.engines.vllm.held_weights import derived_parameters, tied_head
from mcore_rl.errors import WeightSyncError

Indices = tuple[int, ...]


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


class SliceLoader:
    """Loads updates into `model`. `kept`: the slices of HF tensors that this rank keeps.

    Raises: WeightSyncError for parameters that no tensor contains.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, kept: Sequence[KeptSlice]) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._modules = dict(model.named_modules())
        self._pending = PendingSlices(kept)
        loaded = {f"{each.module}.{each.parameter}" for each in kept}
        without = {name for name, _ in model.named_parameters()} - derived_parameters(model) - loaded
        vocabularies = ((n, m) for n, m in self._modules.items() if isinstance(m, VocabParallelEmbedding))
        # This rank's part of a vocabulary may be padding only.
        without -= {f"{name}.weight" for name, table in vocabularies if not table.shard_indices.num_org_elements}
        if without:
            raise WeightSyncError(f"no tensor of the trainer contains {', '.join(sorted(without))}")
        self._module_missing: Counter[str] = Counter()
        self._updating = False

    def begin(self) -> None:
        """Begin an update. Discards an unfinished one, which vLLM would silently continue with wrong results."""
        self.discard()
        for module in self._modules.values():
            # vLLM 0.32 packs experts only when it builds their kernel: without this line the second load silently
            # leaves unpacked weights in a kernel that expects packed ones.
            if isinstance(module, RoutedExperts) and current_platform.is_cpu():
                module.quant_method.moe_kernel = None
        self._pending.begin()
        self._module_missing = Counter()
        for each, numel in self._pending.missing.items():
            self._module_missing[each.module] += numel
        self._updating = True
        initialize_layerwise_reload(self._model)

    def put(self, name: str, start: Indices, box: torch.Tensor) -> None:
        """Copy the kept parts of a box of the HF tensor `name`. The memory of `box` may be reused afterwards.

        start: indices of the box's first element.
        Raises: WeightSyncError for a part that was already received in this update.
        """
        for each, offset, part in self._pending.parts(name, start, box):
            self._copy(each, offset, part)

    def finish(self) -> None:
        """Finish the update.

        Raises: WeightSyncError naming tensors that were not received completely.
        """
        self._pending.require_complete()
        finalize_layerwise_reload(self._model, self._vllm_config.model_config)
        head = tied_head(self._model)
        if head is not None:
            # A reload treats a tied head as a layer without tensors and does not update its packed copy.
            head.quant_method.process_weights_after_loading(head)
        self._updating = False

    def discard(self) -> None:
        """Discard an unfinished update. The kernels then hold weights of two versions."""
        if self._updating:
            discard_reload(self._model)
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            self._updating = False

    def _copy(self, each: KeptSlice, offset: int, source: torch.Tensor) -> None:
        """Copy a part of a slice to its place in the parameter."""
        layer = self._modules[each.module]
        info = get_layerwise_info(layer)
        parameter = getattr(layer, each.parameter)
        # Parameters are on meta until the first slice of their module arrives, which bounds the memory of an update.
        if parameter.is_meta:
            materialize_layer(layer, info)
            parameter = getattr(layer, each.parameter)
            if isinstance(layer, VocabParallelEmbedding):
                parameter.data.zero_()  # padding rows, which no tensor contains
        parameter.data.as_strided(source.shape, each.strides, offset).copy_(source)
        self._module_missing[each.module] -= source.numel()
        # The module is complete: vLLM converts it and copies it into the memory of its kernels.
        if not self._module_missing[each.module]:
            _layerwise_process(layer, info)
