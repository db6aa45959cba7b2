"""Weight updates of an SGLang rank (runs in SGLang's environment).

Slices are copied directly to the places in parameters that were recorded from SGLang's own loaders. Checked with SGLang
0.5.23 on CPUs without AMX, where parameters are not packed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader

from mcore_rl.engines.kept_slices import KeptSlice, TensorSpec, parts_of, record, storage_key
from mcore_rl.engines.sglang.held_weights import held_tensors, vocabulary_padding
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.connection import Connection, connect_engine_rank
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import Box, ShardMap
from mcore_rl.weights.verify import Comparison, compare, require_planned

Indices = tuple[int, ...]


class RankWeights:
    """Receives weight updates into `model`, on rank `rank` of an engine with `layout`."""

    def __init__(self, model: torch.nn.Module, rank: int, layout: EngineLayout, device: torch.device) -> None:
        self._model: Any = model
        self._rank, self._layout, self._device = rank, layout, device
        self._receiver: SliceReceiver
        self._boxes: dict[str, Box] = {}
        self._kept: dict[str, list[KeptSlice]] = {}
        self._missing: Counter[KeptSlice] = Counter()

    def connect(self, connection: Connection, first_rank: int) -> None:
        """Connect to the sync and record the parts of tensors that this rank keeps (as vLLM's worker_extension).

        Collective: all processes of the sync.
        Raises: WeightSyncError if this rank keeps other parts of tensors than the plan sends.
        """
        plan = connection.plan
        if self._layout != plan.engine_layout:
            raise WeightSyncError(
                f"the engine's layout is {self._layout}, but the sync was planned for {plan.engine_layout}"
            )
        self._receiver = connect_engine_rank(connection, first_rank + self._rank)
        shard_map = ShardMap(plan.rows, self._layout)
        self._boxes = shard_map.boxes(self._rank)
        specs = [
            TensorSpec(name, bound.dtype, shape)
            for bound in shard_map.rows
            for name, shape in zip(bound.hf, bound.row.shapes, strict=True)
        ]
        kept = self._record(specs)
        require_planned({each.name: (each.start, each.size) for each in kept}, self._boxes, self._rank)
        self._kept = {}
        for each in kept:
            self._kept.setdefault(each.name, []).append(each)
        self._clear_padding(kept)

    def begin(self) -> None:
        self._missing = Counter({each: each.numel for kept in self._kept.values() for each in kept})
        self._receiver.begin()
        DefaultModelLoader.restore_weights_before_loading(self._model, self._device)

    @torch.no_grad()
    def receive(self, sync_round: int) -> int:
        return self._receiver.receive(sync_round, self._put)

    def finish(self) -> None:
        """Finish the update.

        Raises: WeightSyncError if a part that this rank keeps was not received.
        """
        self._receiver.finish()
        missing = sorted({each.name for each, numel in self._missing.items() if numel})
        if missing:
            raise WeightSyncError(f"the update lacks all or part of {', '.join(missing[:8])}")
        DefaultModelLoader.postprocess_weights(self._model, self._device)

    def compare(self) -> Comparison:
        return compare(self._receiver.digests(), held_tensors(self._model, self._boxes), self._boxes)

    @torch.no_grad()
    def _record(self, specs: list[TensorSpec]) -> list[KeptSlice]:
        places: dict[int, tuple[str, str]] = {}
        for name, module in self._model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(storage_key(parameter), (name, key))
        kept = record(self._model, places, specs, "SGLang")
        # The name of the root module is empty. No slice is sent for a part of the vocabulary that is padding only.
        without = {".".join(place).lstrip(".") for place in places.values()}
        without -= {f"{each.module}.{each.parameter}" for each in kept}
        without -= {f"{name}.weight" for name in vocabulary_padding(self._model)}
        if without:
            raise WeightSyncError(f"no tensor of the trainer contains {', '.join(sorted(without))}")
        return kept

    @torch.no_grad()
    def _clear_padding(self, kept: list[KeptSlice]) -> None:
        """Zero the padding that no update writes: kernels read it, and dummy initialisation leaves random values."""
        by_parameter: dict[tuple[str, str], list[KeptSlice]] = {}
        for each in kept:
            by_parameter.setdefault((each.module, each.parameter), []).append(each)
        for (module, name), parts in by_parameter.items():
            parameter = getattr(self._model.get_submodule(module), name).data
            if sum(part.numel for part in parts) < parameter.numel():
                covered = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
                for part in parts:
                    covered.as_strided(part.size, part.strides, part.offset).fill_(True)
                parameter.masked_fill_(~covered, 0)

    def _put(self, name: str, start: Indices, box: torch.Tensor) -> None:
        for each, offset, source in parts_of(self._kept.get(name, ()), start, box):
            if source.numel() > self._missing[each]:
                raise WeightSyncError(f"received a part of {each.name} twice in one update")
            parameter = getattr(self._model.get_submodule(each.module), each.parameter).data
            parameter.as_strided(source.shape, each.strides, offset).copy_(source)
            self._missing[each] -= source.numel()
