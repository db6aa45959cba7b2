"""Stands in for the trainer in sync tests: a transformers model whose tensors two "ranks" write to buckets.

The plan is made here, with no converter in between: what an engine then holds must be the transformers model.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.weights.plan import plan_buckets
from mcore_rl.weights.transports.shared_memory import SharedBuckets
from mcore_rl.weights.verify import BucketDigests
from mcore_rl.weights.write import BucketWriter
from model_converters.mapping.plan import Piece, TensorPlan


def hf_tensors(model: Any) -> dict[str, torch.Tensor]:
    """HF names (one tensor per expert) in the order embedding, layers, head."""
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(model, dict(model.state_dict()))
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    order = {"embedding": -1, "head": 1 << 30}
    return dict(sorted(state.items(), key=lambda item: order.get(_group(item[0]), 0) or _layer(item[0])))


def _group(name: str) -> str:
    if ".layers." in name:
        return f"layer.{_layer(name) - 1}"
    return "embedding" if "embed_tokens" in name else "head"


def _layer(name: str) -> int:
    return int(name.split(".layers.")[1].split(".", maxsplit=1)[0]) + 1


class HFTrainer:
    """Two writers: even rows of every tensor's halves come from rank 0, the others from rank 1."""

    def __init__(self, model: Any, bucket_bytes: int, num_slots: int) -> None:
        self.model = model
        plans = []
        for name, tensor in hf_tensors(model).items():
            half = tensor.shape[0] // 2
            pieces = (Piece(0, name, 0, 0, 0, half, 0), Piece(1, name, 0, 0, half, tensor.shape[0] - half, 0))
            plans.append(TensorPlan(name, tuple(tensor.shape), tensor.dtype, _group(name), pieces))
        self.buckets = SharedBuckets.create(plan_buckets(plans, bucket_bytes, num_slots))
        self.spec = self.buckets.spec
        self.writers = [BucketWriter(self.spec, self.buckets, plans, rank) for rank in (0, 1)]

    def write(self, index: int) -> int:
        tensors = hf_tensors(self.model)
        halves = [
            {name: tensor[: tensor.shape[0] // 2] for name, tensor in tensors.items()},
            {name: tensor[tensor.shape[0] // 2 :] for name, tensor in tensors.items()},
        ]
        return sum(writer.write(index, half) for writer, half in zip(self.writers, halves, strict=True))

    def publish(self, engine: Any, version: int) -> None:
        engine.call("receiver.begin_update")
        for index in range(self.spec.num_buckets):
            written = self.write(index)
            assert engine.call("receiver.receive_bucket", index) == written == self.spec.bucket_bytes(index)
        engine.call("receiver.finish_update", version)

    def digests(self) -> dict[str, str]:
        digests = BucketDigests(self.buckets)
        for index in range(self.spec.num_buckets):
            self.write(index)
            digests.add(index)
        return digests.result()

    def perturb(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.add_(noise.to(parameter.dtype))
