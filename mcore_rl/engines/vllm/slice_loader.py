"""Loads received boxes of HF tensors into a vLLM rank. Checked with vLLM 0.32.

The places of the boxes are recorded from vLLM's loaders, which write parameters in the checkpoint format; a layer-wise
reload restores this format temporarily.
Each box is copied directly to its recorded places in the parameters, which have the checkpoint format during an update.
When a module is complete, vLLM converts it to the format of its kernels. Not checked on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from vllm.config import VllmConfig, set_current_vllm_config
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

from mcore_rl.engines.held_weights import Held
from mcore_rl.engines.kept_slices import KeptSlice, SliceLoader, record, storage_key
from mcore_rl.engines.vllm.draft_layers import hf_name
from mcore_rl.engines.vllm.held_weights import derived_parameters, held_tensors, tied_head
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.shard_map import Boxes


class ReloadingLoader(SliceLoader):
    """Loads updates with vLLM's layer-wise reload."""

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig) -> None:
        super().__init__(model)
        for parameter in model.parameters():
            # vLLM 0.32 compares the names of loaders, which a partial function (MiniMax-M2's norms) does not have.
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, partial):
                vars(loader)["__name__"] = loader.func.__name__
        fields = vars(vllm_config.model_config.hf_config)
        if fields.get("quantization_config", ...) is None:
            # weights.engine_config hides it. vLLM 0.32's loader of gpt-oss subscripts the field if it is present.
            del fields["quantization_config"]
        self._vllm_config = vllm_config
        self._module_missing: Counter[str] = Counter()
        self._only_slice: dict[str, KeptSlice] = {}
        """The HF tensor of each parameter that has exactly one, under another name."""
        self._fused: dict[str, str] = {}
        """HF name of each part of a fused module, by the name that the part has beside this module, if they differ."""
        self._updating = False
        self._frozen_modules: set[str] = set()
        """Modules whose weights are all frozen."""

    def context(self) -> AbstractContextManager[None]:
        return set_current_vllm_config(self._vllm_config)

    def record(self, whole: Mapping[str, torch.Tensor]) -> list[KeptSlice]:
        self._discard()
        initialize_layerwise_reload(self._model)  # parameters in the checkpoint format, on meta
        try:
            places: dict[int, tuple[str, str]] = {}
            for name, module in self._model.named_modules():
                for parameter, tensor in get_layer_tensors(module).items():
                    places.setdefault(storage_key(tensor), (name, parameter))
                    if hasattr(tensor, "weight_loader"):
                        tensor.weight_loader = _get_original_loader(tensor)  # without counting and building kernels
            return record(self._model, places, whole, "vLLM")
        finally:
            self._discard_reload()

    def held(self, boxes: Mapping[str, Boxes]) -> Iterator[Held]:
        for name, tensor in held_tensors(self._model):
            kept = self._only_slice.get(name)
            # A loader may rename or reshape a tensor: a router's correction bias, which checkpoints store as a row.
            if kept is not None and kept.numel == tensor.numel():
                yield kept.name, tensor.reshape(kept.size)
            else:
                name = hf_name(name)
                yield self._fused.get(name, name), tensor

    def keep(self, kept: Sequence[KeptSlice], frozen: Collection[str] = ()) -> None:
        super().keep(kept, frozen)
        modules = [{each.module for each in kept if (each.name in self._frozen) == only} for only in (True, False)]
        self._frozen_modules = modules[0]
        if mixed := sorted(modules[0] & modules[1]):
            raise WeightSyncError(f"vLLM loads whole modules, but only parts of {', '.join(mixed[:8])} are frozen")
        names = Counter(f"{each.module}.{each.parameter}" for each in kept)
        self._only_slice = {
            name: each
            for each in kept
            if names[name := f"{each.module}.{each.parameter}"] == 1 and hf_name(name) != each.name
        }
        self._fused = {name: each.name for each in kept if (name := hf_name(_part_name(each))) != each.name}

    def begin(self, *, whole: bool = True) -> None:
        # vLLM would silently continue an unfinished update with wrong results.
        self._discard()
        left = set() if whole else {self._modules[name] for name in self._frozen_modules}
        for module in self._modules.values():
            if module in left:
                continue
            # vLLM 0.32 packs experts only when it builds their kernel: without this line the second load silently
            # leaves unpacked weights in a kernel that expects packed ones.
            if isinstance(module, RoutedExperts) and current_platform.is_cpu():
                module.quant_method.moe_kernel = None
        super().begin(whole=whole)
        self._module_missing = Counter()
        for each, numel in self._missing.items():
            self._module_missing[each.module] += numel
        self._updating = True
        initialize_layerwise_reload(self._model)
        for module in left:
            _restore(module)

    def finish(self) -> None:
        super().finish()
        finalize_layerwise_reload(self._model, self._vllm_config.model_config)
        head = tied_head(self._model)
        updated = {each.module for each in self._missing}
        if head is not None and any(getattr(self._modules[name], "weight", None) is head.weight for name in updated):
            # A reload treats a tied head as a layer without tensors and does not update its packed copy.
            head.quant_method.process_weights_after_loading(head)
        self._updating = False

    def _discard(self) -> None:
        if self._updating:
            self._discard_reload()
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            self._updating = False

    @torch.no_grad()
    def _discard_reload(self) -> None:
        """Cancel an unfinished reload. Kernels keep their earlier weights, except in modules that were complete.

        Unlike vLLM's own end of a reload, this does not convert incomplete layers to the kernels' format: their weights
        are of two versions or uninitialised.
        """
        self._model._do_torchao_reload = getattr(self._model, "_original_do_torchao_reload", False)
        for layer in self._model.modules():
            _restore(layer)

    def _parameter_names(self) -> set[str]:
        return {name for name, _ in self._model.named_parameters()} - derived_parameters(self._model)

    def _copy(self, kept: KeptSlice, offset: int, source: torch.Tensor) -> None:
        layer = self._modules[kept.module]
        info = get_layerwise_info(layer)
        parameter = getattr(layer, kept.parameter)
        # Parameters are on meta until the first slice of their module arrives, which bounds the memory of an update.
        if parameter.is_meta:
            materialize_layer(layer, info)
            parameter = getattr(layer, kept.parameter)
            if isinstance(layer, VocabParallelEmbedding):
                parameter.data.zero_()  # padding rows, which no tensor contains
        parameter.data.as_strided(source.shape, kept.strides, offset).copy_(source)
        self._module_missing[kept.module] -= source.numel()
        # The module is complete: vLLM converts it and copies it into the memory of its kernels.
        if not self._module_missing[kept.module]:
            _layerwise_process(layer, info)


@torch.no_grad()
def _restore(layer: torch.nn.Module) -> None:
    """Give a layer its kernels' tensors back, if it has the checkpoint format."""
    info = get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        _place_kernel_tensors(layer, info)
        info.reset()


def _part_name(kept: KeptSlice) -> str:
    """Return the name of an HF tensor beside the module that contains it: gpt-oss's attn.qkv_proj has attn.q_proj,
    which releases name self_attn.q_proj."""
    folder, _, _ = kept.module.rpartition(".")
    return ".".join([folder, *kept.name.split(".")[-2:]])
