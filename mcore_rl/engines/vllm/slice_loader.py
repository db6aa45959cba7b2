"""Puts what arrives of HF tensors into a rank of vLLM: each slice straight to its recorded place, in the format of
checkpoints; vLLM builds the kernels' format of a module once all of it has come.

Parameters in the kernels' format are never written here. Not checked on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.platforms import current_platform

from mcore_rl.engines.kept_slices import KeptSlice, parts_of
from mcore_rl.engines.vllm.held_weights import derived_parameters, tied_head
from mcore_rl.engines.vllm.kept_slices import discard_reload
from mcore_rl.errors import WeightSyncError

Indices = tuple[int, ...]


class SliceLoader:
    """Loads updates into `model`, whose ranks keep `kept` of every tensor.

    Raises: WeightSyncError for parameters of which no tensor brings anything.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, kept: Sequence[KeptSlice]) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._modules = dict(model.named_modules())
        self._kept: dict[str, list[KeptSlice]] = {}
        for each in kept:
            self._kept.setdefault(each.name, []).append(each)
        brought = {f"{each.module}.{each.parameter}" for each in kept}
        without = {name for name, _ in model.named_parameters()} - derived_parameters(model) - brought
        without -= {f"{name}.weight" for name, module in self._modules.items() if _is_padding(module)}
        if without:
            raise WeightSyncError(f"no tensor of the trainer brings anything of {', '.join(sorted(without))}")
        self._missing: Counter[KeptSlice] = Counter()
        self._module_missing: Counter[str] = Counter()
        self.updating = False

    def begin(self) -> None:
        """Begins an update, or another in the place of one that was not finished: vLLM would go on in that one, and be
        silently wrong."""
        self.discard()
        for module in self._modules.values():
            # vLLM 0.32 repacks experts only when it builds their kernel: without this the second load leaves unpacked
            # weights under a kernel that expects packed ones, silently.
            if isinstance(module, RoutedExperts) and current_platform.is_cpu():
                module.quant_method.moe_kernel = None
        self._missing = Counter({each: each.numel for kept in self._kept.values() for each in kept})
        self._module_missing = Counter()
        for each, numel in self._missing.items():
            self._module_missing[each.module] += numel
        self.updating = True
        initialize_layerwise_reload(self._model)

    def put(self, name: str, start: Indices, box: torch.Tensor) -> None:
        """Takes from a box of the HF tensor, whose first element is at `start`, what this rank keeps. The memory of
        `box` is not needed afterwards.

        Raises: WeightSyncError for what has come before.
        """
        for each, offset, part in parts_of(self._kept.get(name, ()), start, box):
            self._copy(each, offset, part)

    def finish(self) -> None:
        """Ends the update.

        Raises: WeightSyncError naming tensors that did not come whole.
        """
        missing = sorted({each.name for each, numel in self._missing.items() if numel})
        if missing:
            raise WeightSyncError(f"the update brought nothing, or not all, of {', '.join(missing[:8])}")
        finalize_layerwise_reload(self._model, self._vllm_config.model_config)
        head = tied_head(self._model)
        if head is not None:
            # The reload sees a tied head as a layer without tensors and leaves its packed copy as it was.
            head.quant_method.process_weights_after_loading(head)
        self.updating = False

    def discard(self) -> None:
        """Takes back an update that was begun and not finished: what the kernels hold is then of two versions."""
        if self.updating:
            discard_reload(self._model)
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            self.updating = False

    def _copy(self, each: KeptSlice, offset: int, source: torch.Tensor) -> None:
        """Puts a part of a slice into its place."""
        numel = source.numel()
        if numel > self._missing[each]:
            raise WeightSyncError(f"a part of {each.name} came twice in one update")
        layer = self._modules[each.module]
        info = get_layerwise_info(layer)
        parameter = getattr(layer, each.parameter)
        if parameter.is_meta:
            materialize_layer(layer, info)
            parameter = getattr(layer, each.parameter)
            if isinstance(layer, VocabParallelEmbedding):
                parameter.data.zero_()  # rows behind the vocabulary, which no tensor brings
        parameter.data.as_strided(source.shape, each.strides, offset).copy_(source)
        self._missing[each] -= numel
        self._module_missing[each.module] -= numel
        if not self._module_missing[each.module]:
            _layerwise_process(layer, info)


def _is_padding(module: torch.nn.Module) -> bool:
    """Whether this rank's part of the vocabulary is all behind its end."""
    return isinstance(module, VocabParallelEmbedding) and not module.shard_indices.num_org_elements
