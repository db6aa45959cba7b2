"""What the trainer holds between two passes, byte by byte: weights, gradients and optimizer state of every rank.

The parameters come from megatron's own model, built on the meta device once per pipeline stage: the ranks of a stage
hold equally many tensors of equal shapes in the same order, which `check` confirms by the weight table for every rank.
What is allocated for them follows megatron-core 0.16.1:

- A chunk's parameters lie in buffers, from the last to the first: one of the dense parameters, one of the experts
  where ep > 1. With the distributed optimizer a parameter starts at a multiple of 64 elements, and a bucket ends at a
  multiple of lcm(data-parallel size, 128). Without overlapping gradient reduction a buffer is one bucket, but for a
  tied embedding, which has its own.
- Weights in their dtype, and gradients in float32, take the whole buffer. Without the distributed optimizer there is no
  padding.
- Data-parallel rank r of n owns the r-th of n equal stretches of every bucket. Its optimizer state is that of the
  parameters in there: two float32 moments, and a float32 copy where the weights are in bfloat16. Experts are owned
  over the expert-data-parallel ranks. Without the distributed optimizer every rank has the whole.
- With actor.optimizer.cpu_offload the optimizer's state is in host memory instead, and a piece of it (or the largest
  parameter's, if that is more) on the device during a step.
- Weights under LoRA adapters are neither: they have no gradient and no optimizer state.
- torch's AdamW counts steps in a float32 scalar per parameter; apex's and TransformerEngine's count per group.

Source: core/distributed/{distributed_data_parallel,param_and_grad_buffer}.py, core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch

from mcore_rl.config.models import ActorConfig
from mcore_rl.megatron.optim.host_optimizer import PIECE_ELEMENTS
from model_converters.mapping.layout import TrainLayout

ALIGNED_PARAMETER, ALIGNED_BUCKET = 64, 128
"""Elements: megatron's alignment of a parameter's start and of a bucket's end."""
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Elements: megatron's buckets when the reduction of gradients overlaps with the backward pass."""
STEP_BYTES = 4


@dataclass(frozen=True)
class HeldParameter:
    """`expert`: reduced and owned over the expert-data-parallel group. `own_bucket`: a tied embedding of several
    stages. `trained`: with a gradient and optimizer state; else it lies by itself, outside of megatron's buffers."""

    elements: int
    expert: bool = False
    own_bucket: bool = False
    trained: bool = True


@dataclass(frozen=True)
class Numerics:
    """Of the trainer's state. `counts_steps`: the optimizer is torch's own. `on_host`: its state is in host memory."""

    weight_bytes: int
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    counts_steps: bool
    on_host: bool = False

    @classmethod
    def of(cls, actor: ActorConfig, dtype: torch.dtype, *, fused_optimizer: bool) -> Numerics:
        return cls(
            dtype.itemsize,
            actor.distributed_optimizer,
            actor.overlap_grad_reduce,
            counts_steps=not fused_optimizer,
            on_host=actor.optimizer.cpu_offload,
        )

    @property
    def state_bytes(self) -> int:
        """Per owned element, wherever it lies: two moments, and a main copy of a weight that is not float32 itself."""
        return 8 + (4 if self.weight_bytes < 4 else 0)

    @property
    def optimizer_bytes(self) -> int:
        """Of them on the device."""
        return 0 if self.on_host else self.state_bytes

    @property
    def host_bytes(self) -> int:
        """Of them in host memory for good."""
        return self.state_bytes if self.on_host else 0

    def piece_bytes(self, largest: int) -> int:
        """What a step has on the device of state that lies on the host; `largest`: elements of one parameter."""
        return self.host_bytes * max(PIECE_ELEMENTS, largest)


@dataclass(frozen=True)
class RankState:
    """One rank's share. Units: elements, bytes."""

    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    host_bytes: int = 0
    """In host memory for good; not in total_bytes."""
    piece_bytes: int = 0
    """On the device while a step updates it; not in total_bytes."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Buffer:
    """Parameters laid out in one buffer: where each starts and ends, and where its buckets do. Units: elements."""

    starts: np.ndarray
    ends: np.ndarray
    buckets: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    def owned(self, ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Elements, and parameters in part or whole, that each of `ranks` data-parallel ranks owns, and the most
        elements that one of them has.

        Shapes: int64 [ranks] each.
        """
        elements, parameters, largest = (np.zeros(ranks, np.int64) for _ in range(3))
        for start, end in self.buckets:
            first, last = np.searchsorted(self.starts, [start, end])
            edges = start + (end - start) // ranks * np.arange(ranks + 1)
            low = np.maximum(self.starts[first:last, None], edges[None, :-1])
            high = np.minimum(self.ends[first:last, None], edges[None, 1:])
            overlap = np.maximum(high - low, 0)
            elements += overlap.sum(0)
            parameters += (overlap > 0).sum(0)
            largest = np.maximum(largest, overlap.max(0, initial=0))
        return elements, parameters, largest


def stage_state(
    chunks: Sequence[Sequence[HeldParameter]], layout: TrainLayout, stage: int, numerics: Numerics
) -> list[RankState]:
    """The state of every rank of a stage, from what `stage_parameters` says of it."""
    size, dense_ranks = layout.stage_size, layout.dp * layout.cp
    elements = frozen = 0
    owned, shards, largest = (np.zeros(size, np.int64) for _ in range(3))
    inner = np.arange(size)
    # The place of a rank among those that share its gradients; see TrainLayout for the order of ranks.
    groups = ((False, dense_ranks, inner // layout.tp), (True, layout.edp, inner // (layout.etp * layout.ep)))
    for index, chunk in enumerate(chunks):
        bucket = None
        if numerics.overlap_grad_reduce and stage == 0 and index == 0:
            bucket = max(SMALLEST_BUCKET, BUCKET_PER_RANK * dense_ranks)
        frozen += sum(parameter.elements for parameter in chunk if not parameter.trained)
        for expert, ranks, place in groups:
            trained = [parameter for parameter in chunk if parameter.trained and parameter.expert == expert]
            if not trained:
                continue
            buffer = lay_out(trained, ranks, bucket, aligned=numerics.distributed_optimizer)
            elements += buffer.elements
            if numerics.distributed_optimizer:
                rank_elements, parts, most = buffer.owned(ranks)
                owned, shards = owned + rank_elements[place], shards + parts[place]
                largest = np.maximum(largest, most[place])
            else:
                owned, shards = owned + buffer.elements, shards + len(trained)
    parameters = sum(parameter.elements for chunk in chunks for parameter in chunk)
    optimizer = owned * numerics.optimizer_bytes + shards * (STEP_BYTES if numerics.counts_steps else 0)
    return [
        RankState(
            parameters,
            (elements + frozen) * numerics.weight_bytes,
            elements * 4,
            int(optimizer[rank]),
            host_bytes=int(owned[rank]) * numerics.host_bytes,
            piece_bytes=numerics.piece_bytes(int(largest[rank])),
        )
        for rank in range(size)
    ]


def lay_out(held: Sequence[HeldParameter], ranks: int, bucket_elements: int | None, *, aligned: bool) -> Buffer:
    """Megatron's buffer of `held`, last parameter first; `aligned` for the distributed optimizer."""
    to_parameter, to_bucket = (ALIGNED_PARAMETER, lcm(ranks, ALIGNED_BUCKET)) if aligned else (1, 1)
    starts, ends, buckets = [], [], []
    bucket_start = position = 0
    for parameter in reversed(held):
        alone = parameter.own_bucket and aligned
        position = _up(position, to_parameter)
        if alone and position > bucket_start:
            position = _up(position, to_bucket)
            buckets.append((bucket_start, position))
            bucket_start = position
        starts.append(position)
        position += parameter.elements
        ends.append(position)
        if alone or (bucket_elements is not None and position - bucket_start >= bucket_elements):
            position = _up(position, to_bucket)
            buckets.append((bucket_start, position))
            bucket_start = position
    if position > bucket_start:
        buckets.append((bucket_start, _up(position, to_bucket)))
    return Buffer(np.array(starts, np.int64), np.array(ends, np.int64), tuple(buckets))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
