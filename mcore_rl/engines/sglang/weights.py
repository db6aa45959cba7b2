"""Weights of an SGLang rank: updates, and the weights that the kernels use (runs in SGLang's environment).

The places of slices were recorded while SGLang's own loaders ran (kept_slices.py). On CPUs without AMX, SGLang does not
pack its parameters: query, key and value projections are concatenated, and so are gate and up projections. The inner
dimension of an MLP is padded with zeros to a multiple of 32 per rank. Checked with SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.loader import DefaultModelLoader

from mcore_rl.engines.held_weights import Held, Reader, linear_parts, modules_with_parameters, read_module
from mcore_rl.engines.kept_slices import KeptSlice, SliceLoader, record, storage_key
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.shard_map import Box

CPU = torch.device("cpu")
EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down projection: in most families, and in Mixtral."""


class ParameterLoader(SliceLoader):
    """Copies slices straight into the parameters."""

    def record(self, whole: Mapping[str, torch.Tensor]) -> list[KeptSlice]:
        return record(self._model, self._places(), whole, "SGLang")

    def held(self, boxes: Mapping[str, Box]) -> Iterator[Held]:
        readers: list[Reader] = [
            (VocabParallelEmbedding, UnquantizedEmbeddingMethod, _vocabulary),
            (LinearBase, UnquantizedLinearMethod, lambda module, name: linear_parts(module, name, module.weight)),
            (FusedMoE, UnquantizedFusedMoEMethod, partial(_experts, boxes=boxes)),
        ]
        for name, module in modules_with_parameters(self._model):
            if getattr(module, "use_intel_amx_backend", False):
                raise WeightSyncError(
                    f"{name}: weights packed for AMX cannot be read back; set weights.verify_every to 0"
                )
            for hf_name, tensor in read_module(module, name, readers):
                yield hf_name, _without_padding(hf_name, tensor, boxes)

    def keep(self, kept: Sequence[KeptSlice]) -> None:
        """Expect these slices, and zero the padding that no update writes: kernels read it, and dummy initialisation
        leaves random values."""
        super().keep(kept)
        by_parameter: dict[tuple[str, str], list[KeptSlice]] = {}
        for each in kept:
            by_parameter.setdefault((each.module, each.parameter), []).append(each)
        for parts in by_parameter.values():
            parameter = self._parameter(parts[0])
            if sum(part.numel for part in parts) < parameter.numel():
                covered = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
                for part in parts:
                    covered.as_strided(part.size, part.strides, part.offset).fill_(True)
                parameter.masked_fill_(~covered, 0)

    def begin(self) -> None:
        super().begin()
        DefaultModelLoader.restore_weights_before_loading(self._model, CPU)

    def finish(self) -> None:
        super().finish()
        DefaultModelLoader.postprocess_weights(self._model, CPU)

    def _parameter_names(self) -> set[str]:
        return {f"{module}.{parameter}" for module, parameter in self._places().values()}

    def _copy(self, kept: KeptSlice, offset: int, source: torch.Tensor) -> None:
        self._parameter(kept).as_strided(source.shape, kept.strides, offset).copy_(source)

    def _parameter(self, kept: KeptSlice) -> torch.Tensor:
        parameter: torch.Tensor = getattr(self._modules[kept.module], kept.parameter).data
        return parameter

    def _places(self) -> dict[int, tuple[str, str]]:
        """Return module and name of every parameter by storage_key."""
        places: dict[int, tuple[str, str]] = {}
        for name, parameter in self._model.named_parameters():
            module, _, key = name.rpartition(".")
            # Tied modules share a storage; the first name stands for both.
            places.setdefault(storage_key(parameter), (module, key))
        return places


def _without_padding(name: str, tensor: torch.Tensor, boxes: Mapping[str, Box]) -> torch.Tensor:
    size = boxes[name][1] if name in boxes else tuple(tensor.shape)
    for dim, length in enumerate(size):
        if tensor.shape[dim] > length:
            if tensor.narrow(dim, length, tensor.shape[dim] - length).any():
                raise WeightSyncError(f"{name}: SGLang's padding is not zero")
            tensor = tensor.narrow(dim, 0, length)
    return tensor


def _vocabulary(module: VocabParallelEmbedding, name: str) -> list[Held]:
    return [(f"{name}.weight", module.weight[: module.shard_indices.num_org_elements])]


def _experts(module: FusedMoE, name: str, boxes: Mapping[str, Box]) -> Iterator[Held]:
    if module.moe_ep_size > 1:
        raise WeightSyncError(f"{name}: experts divided over ranks cannot be read back; set weights.verify_every to 0")
    # w13 stacks gate and up, each padded to the same number of rows.
    padded = module.w13_weight.shape[1] // 2
    # The boxes show which of the two naming schemes the model has.
    gate, up, down = EXPERT_PARTS[f"{name}.0.w1.weight" in boxes]
    for expert, (rows, columns) in enumerate(zip(module.w13_weight, module.w2_weight, strict=True)):
        yield f"{name}.{expert}.{gate}.weight", rows[:padded]
        yield f"{name}.{expert}.{up}.weight", rows[padded:]
        yield f"{name}.{expert}.{down}.weight", columns
