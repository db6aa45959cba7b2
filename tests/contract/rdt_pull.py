"""vLLM's sharded_rdt in a process without a GPU, NIXL and Ray's object transport: everything of a consumer is vLLM's
own but for what these would do. A pull is answered here, by the view operations that it asks for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

Tensors = dict[str, torch.Tensor]


@dataclass
class Pull:
    """A reference to what a producer is to send: its bytes, and where they go."""

    content: torch.Tensor
    target: torch.Tensor | None = None


@dataclass
class Producer:
    """Stands in for the actor of vLLM's beside a trainer rank: packs what is asked for as that one does, 16 bytes
    aligned, and counts the groups that are given back."""

    tensors: Tensors
    pulled_bytes: int = 0
    freed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_group = mock.Mock(remote=self.freed.append)
        self.reserve_serve_buffer = mock.Mock()
        self.rdt_produce_weights_batched = mock.Mock(remote=self._produce)

    def _produce(self, keys: list[Any], **_: int) -> Pull:
        from vllm.distributed.weight_transfer.sharded_rdt_common import ALLOWED_OPS

        packed = bytearray()
        for name, chain in keys:
            tensor = self.tensors[name]
            for operation, args, kwargs in chain:
                assert operation in ALLOWED_OPS
                tensor = getattr(tensor, operation)(*args, **dict(kwargs))
            packed += bytes(-len(packed) % 16) + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        self.pulled_bytes += len(packed)
        return Pull(torch.frombuffer(packed, dtype=torch.uint8))


def _get(what: Any) -> Any:
    """ray.get."""
    if isinstance(what, Pull):
        assert what.target is not None
        what.target.copy_(what.content)
    return what


def _aim(pull: Pull, targets: list[torch.Tensor]) -> None:
    """ray.experimental.set_target_for_ref."""
    (pull.target,) = targets
    assert pull.target.numel() == pull.content.numel()


@contextlib.contextmanager
def without_devices(producers: dict[str, Producer]) -> Iterator[None]:
    """Ray knows these actors, and CUDA's streams are those of the CPU, which does one thing after the other."""
    nothing, module = contextlib.nullcontext, "vllm.distributed.weight_transfer.sharded_rdt_engine"
    with contextlib.ExitStack() as stack:
        for target, stand_in in (
            ("ray.get_actor", lambda name, namespace: producers[name]),
            ("ray.get", _get),
            ("ray.experimental.set_target_for_ref", _aim),
            (f"{module}.register_nixl_memory", lambda tensor: None),
            ("torch.cuda.set_device", lambda device: None),
            ("torch.cuda.device", lambda device: nothing()),
            ("torch.cuda.stream", lambda stream: nothing()),
            ("torch.cuda.Event", mock.Mock),
            ("torch.cuda.Stream", mock.Mock),
        ):
            stack.enter_context(mock.patch(target, stand_in))
        yield


class Consumers:
    """In the engine's process, of its only rank."""

    producers: dict[str, Producer]


def prepare(engine: Any, payload: dict[str, Any], held: list[Tensors]) -> None:
    """Gives the rank a consumer as vLLM makes it for ranks that are Ray's, which records what it will pull; `held` is
    what the trainer ranks can give."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from mcore_rl.engines.vllm.ray_ranks import RayRanks

    worker = engine._engine.model_executor.driver_worker.worker
    config = copy.copy(worker.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.distributed_executor_backend = RayRanks
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="sharded_rdt"), config, worker.device, worker.model_runner.get_model()
    )
    names = payload["trainer_actor_names"]
    Consumers.producers = {name: Producer(tensors) for name, tensors in zip(names, held, strict=True)}
    with without_devices(Consumers.producers):
        engine.receiver.pull_from(payload, 0, 1)


def pull(engine: Any, version: int) -> tuple[list[int], list[int], list[list[int]]]:
    """One update. What the rank acknowledges; and by producer the bytes pulled from it, and the groups given back."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in engine._engine.model_executor.driver_worker.worker.model_runner.get_model().modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None  # of CPUs alone: as SliceLoader.begin
    producers = list(Consumers.producers.values())
    before = [producer.pulled_bytes for producer in producers]
    for producer in producers:
        producer.freed.clear()
    with without_devices(Consumers.producers):
        engine.receiver.begin_update()
        acknowledged = engine.receiver.receive_bucket(0)
        engine.receiver.finish_update(version)
    pulled = [producer.pulled_bytes - earlier for producer, earlier in zip(producers, before, strict=True)]
    return acknowledged, pulled, [sorted(producer.freed) for producer in producers]
