"""A trainer rank's side of weights.transport=vllm_rdt: vLLM's own sharded_rdt, by which engine ranks pull the slices
that they keep out of trainer ranks' GPUs (NIXL), layer by layer.

Written against vLLM 0.32. What NIXL and CUDA do in it has never run here; tests run the rest, on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, layerwise_groups
from vllm.distributed.weight_transfer.sharded_rdt_trainer import (
    ShardedRDTTrainerInitInfo,
    ShardedRDTTrainerWeightTransferEngine,
)

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.whole import WholeTensors

Tensors = Callable[[], Mapping[str, torch.Tensor]]
"""A rank's parameters by canonical mcore name, as they are at the moment."""


class HeldTensors(WeightSource):
    """What this rank can give, in vLLM's order: its layers, each at once."""

    def __init__(self, whole: WholeTensors, tensors: Tensors) -> None:
        self._whole = whole
        self._tensors = tensors
        specs = {name: ParamMeta(name, dtype, shape) for name, dtype, shape in whole.specs}
        self._metadata = [specs[name] for group in layerwise_groups(list(specs)) for name in group]

    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    def held_names(self) -> set[str]:
        return self._whole.held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of every layer of which this rank has something; None in the place of what it has not. Collective over those
        that share a tensor."""
        tensors, held = self._tensors(), self.held_names()
        try:
            for group in self.groups():
                for name in group:
                    yield name, self._whole.of(name, tensors) if name in held else None  # type: ignore[misc]
        finally:
            self._whole.forget()  # also of a pass that broke


class _Unasked:
    """vLLM's trainer would drive engines through this; the driver of the run does."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: object) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Producer:
    """Gives weights to engines. `consumers`: ranks of all engines, `per_engine` of each; `namespace`: Ray's, where both
    sides are; `timeout_seconds`: without anything done, after which an update is given up.

    Collective over all trainer ranks.
    """

    def __init__(
        self, source: HeldTensors, rank: int, consumers: int, per_engine: int, *, namespace: str, timeout_seconds: float
    ) -> None:
        info = ShardedRDTTrainerInitInfo(
            num_consumers=consumers,
            workers_per_replica=per_engine,
            trainer_actor_namespace=namespace,
            stall_timeout_s=timeout_seconds,
            rank=rank,
        )
        self._engine = ShardedRDTTrainerWeightTransferEngine.trainer_init(info, client=_Unasked(), source=source)

    def payload(self) -> dict[str, Any]:
        """What engine ranks are told, the same on all trainer ranks."""
        return self._engine.get_worker_init_payload()

    @torch.no_grad()
    def produce(self, consumers: Sequence[int]) -> None:
        """One update, to the end, for these engine ranks. Collective over all trainer ranks.

        Raises: WeightSyncError where nothing was pulled for the time that is given.
        """
        try:
            self._engine.send_weights(list(consumers))
        except RuntimeError as error:
            raise WeightSyncError(f"weights.transport=vllm_rdt: {error}") from error
