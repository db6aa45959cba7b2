"""Weight updates of an SGLang rank (runs in SGLang's environment).

Slices are copied straight into the parameters; their places were recorded while SGLang's own loaders ran
(kept_slices.py). Checked with SGLang 0.5.23 on CPUs without AMX, where parameters are not packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader

from mcore_rl.engines import kept_slices
from mcore_rl.engines.kept_slices import ConnectedRank, KeptSlice, PendingSlices, TensorSpec
from mcore_rl.engines.sglang.held_weights import held_tensors, vocabulary_padding
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.verify import Comparison, compare

Indices = tuple[int, ...]


class RankWeights:
    """Receives weight updates into `model`, on rank `rank` of an engine with `layout`."""

    def __init__(self, model: torch.nn.Module, rank: int, layout: EngineLayout, device: torch.device) -> None:
        self._model, self._rank, self._layout, self._device = model, rank, layout, device
        self._connected: ConnectedRank
        self._pending: PendingSlices

    def connect_weights(self, connection: Connection, first_rank: int) -> None:
        """Connect to the weight sync (see kept_slices.connect_rank) and zero the padding of parameters."""
        self._connected = kept_slices.connect_rank(connection, self._layout, self._rank, first_rank, self._record)
        self._pending = PendingSlices(self._connected.kept)
        self._clear_padding(self._connected.kept)

    def begin_update(self) -> None:
        self._pending.begin()
        self._connected.receiver.begin()
        DefaultModelLoader.restore_weights_before_loading(self._model, self._device)

    @torch.no_grad()
    def receive_bucket(self, sync_round: int) -> int:
        """Receive one round into the parameters. Returns the bytes received."""
        return self._connected.receiver.receive(sync_round, self._put)

    def finish_update(self) -> None:
        """Finish the update.

        Raises: WeightSyncError if a part that this rank keeps was not received.
        """
        self._connected.receiver.finish()
        self._pending.require_complete()
        DefaultModelLoader.postprocess_weights(self._model, self._device)

    def compare_weights(self) -> Comparison:
        boxes = self._connected.boxes
        return compare(self._connected.receiver.digests(), held_tensors(self._model, boxes), boxes)

    @torch.no_grad()
    def _record(self, specs: list[TensorSpec]) -> list[KeptSlice]:
        places: dict[int, tuple[str, str]] = {}
        for name, module in self._model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                # Tied modules share a storage; the first name stands for both.
                places.setdefault(kept_slices.storage_key(parameter), (name, key))
        kept = kept_slices.record(self._model, places, specs, "SGLang")
        # The name of the root module is empty. No slice is sent for a part of the vocabulary that is padding only.
        without = {".".join(place).lstrip(".") for place in places.values()}
        without -= {f"{each.module}.{each.parameter}" for each in kept}
        without -= {f"{name}.weight" for name in vocabulary_padding(self._model)}
        if without:
            raise WeightSyncError(f"no tensor of the trainer contains {', '.join(sorted(without))}")
        return kept

    @torch.no_grad()
    def _clear_padding(self, kept: Sequence[KeptSlice]) -> None:
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
        for each, offset, part in self._pending.parts(name, start, box):
            parameter = getattr(self._model.get_submodule(each.module), each.parameter).data
            parameter.as_strided(part.shape, each.strides, offset).copy_(part)
