"""Weights, gradients and optimizer state of every trainer rank, to the byte.

Parameters come from Megatron's own model, built on the meta device once per pipeline stage. All ranks of a stage hold
tensors of the same shapes in the same order; the planner checks their number against the weight table for every rank.
The allocation follows megatron-core 0.16.1:

- The parameters of a model chunk are in buffers, last parameter first: one buffer for dense parameters, one for experts
  if ep > 1. With the distributed optimizer, a parameter starts at a multiple of 64 elements and a bucket ends at a
  multiple of lcm(data-parallel size, 128). Without overlapped gradient reduction a buffer is one bucket, except that a
  tied embedding has a bucket of its own.
- Weights (in their dtype) and gradients (float32) fill the whole buffer. Without the distributed optimizer there is no
  padding.
- Data-parallel rank r of n owns the r-th of n equal parts of every bucket. Its optimizer state covers the parameters in
  that part: two float32 moments, and a float32 copy of bfloat16 weights. Experts are divided over the
  expert-data-parallel ranks. Without the distributed optimizer every rank owns everything.
- With actor.optimizer.cpu_offload the optimizer state is in host memory. During a step, one piece of it is on the
  device (at least the state of the largest parameter).
- Weights under LoRA adapters have no gradient and no optimizer state and are outside the buffers.
- torch's AdamW stores a float32 step counter per parameter; apex and TransformerEngine store one per group.

Source: core/distributed/{distributed_data_parallel,param_and_grad_buffer}.py, core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np

from mcore_rl.config.models import OffloadConfig
from mcore_rl.megatron.optim.host_optimizer import PIECE_ELEMENTS
from mcore_rl.planner.layers.execution import Execution

ALIGNED_PARAMETER, ALIGNED_BUCKET = 64, 128
"""Megatron's alignment of a parameter's start and of a bucket's end, in elements."""
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Megatron's bucket sizes with overlapped gradient reduction, in elements."""
GRADIENT_BYTES, STEP_BYTES = 4, 4
"""Bytes of a gradient element and of a step counter, both float32."""


@dataclass(frozen=True)
class StageParameter:
    """Size of one parameter of a pipeline stage.

    `expert`: reduced and owned over the expert-data-parallel group. `own_bucket`: a tied embedding that several stages
    hold. `trained`: has a gradient and optimizer state; other parameters are outside Megatron's buffers. `rows`: length
    of dim 0. `layer`: name of its layer, "" outside of layers.
    """

    elements: int
    expert: bool = False
    own_bucket: bool = False
    trained: bool = True
    rows: int = 1
    layer: str = ""


@dataclass(frozen=True)
class RankState:
    """Training state of one rank. Units: elements, bytes.

    `host_bytes`: optimizer state that is always in host memory. `piece_bytes`: optimizer state on the device during a
    step that updates it on the host. `checkpoint_bytes`: weights and optimizer state that this rank writes into a
    checkpoint. None of these is part of total_bytes. `keeps_gradients`: gradients have memory between updates.
    `copy_bytes`: weights of a frozen copy of the model, if they have another size. `gathered_*_bytes`: whole layers
    that a pass gathers from shards (planner/shards.py), in addition to total_bytes.
    """

    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0
    piece_bytes: int = 0
    checkpoint_bytes: int = 0
    keeps_gradients: bool = True
    copy_bytes: int | None = None
    gathered_forward_bytes: int = 0
    gathered_update_bytes: int = 0

    @classmethod
    def of(
        cls,
        run: Execution,
        parameters: int,
        trained: int,
        owned: int,
        *,
        frozen: int = 0,
        steps: int = 0,
        largest: int = 0,
        saved: int = 0,
    ) -> RankState:
        """Convert numbers of elements to bytes.

        `trained` are elements with a gradient, padding included, and `frozen` elements without. `owned` are elements
        whose optimizer state this rank has: `steps` parameters in part or whole, of at most `largest` elements each.
        `saved` are elements that it writes into checkpoints.
        """
        state, on_host = owned * run.optimizer_bytes, run.section.optimizer.cpu_offload
        # On GPUs the optimizer is not torch's own, which counts the steps of each parameter.
        counters = 0 if run.cuda else steps * STEP_BYTES
        # A step moves whole parameters, so a piece is at least the state of the largest one.
        piece = run.optimizer_bytes * max(PIECE_ELEMENTS, largest)
        return cls(
            parameters,
            (trained + frozen) * run.element_bytes,
            trained * GRADIENT_BYTES,
            counters + (0 if on_host else state),
            host_bytes=state if on_host else 0,
            piece_bytes=piece if on_host else 0,
            checkpoint_bytes=saved * (run.element_bytes + run.optimizer_bytes),
        )

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def reference_bytes(self) -> int:
        """Weights of a reference with this model's layout."""
        return self.weights_bytes if self.copy_bytes is None else self.copy_bytes

    def kept_bytes(self, offload: OffloadConfig) -> int:
        """Return the gradients and optimizer state that stay on the device between updates."""
        gradients = 0 if offload.grads or not self.keeps_gradients else self.gradients_bytes
        return gradients + (0 if offload.optimizer else self.optimizer_bytes)

    def resident_bytes(self, offload: OffloadConfig) -> int:
        """Return the state that stays on the device while this model is not used."""
        return self.kept_bytes(offload) + (0 if offload.params else self.weights_bytes)

    def offloaded_bytes(self, offload: OffloadConfig) -> int:
        """Return the host memory of this rank while its model is not used. Offloaded gradients are dropped."""
        weights = self.weights_bytes if offload.params else 0
        return self.host_bytes + weights + (self.optimizer_bytes if offload.optimizer else 0)


@dataclass(frozen=True)
class BufferLayout:
    """Layout of Megatron's gradient buffer: start and end of every parameter and bucket, in elements."""

    starts: np.ndarray
    ends: np.ndarray
    buckets: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    def owned(self, ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count what each of `ranks` data-parallel ranks owns: elements, parameters (in part or whole), and elements of
        the largest of these.

        Shapes: int64 [ranks] each.
        """
        elements, parameters, largest = (np.zeros(ranks, np.int64) for _ in range(3))
        for start, end in self.buckets:
            first, last = np.searchsorted(self.starts, [start, end])
            # Row: a parameter of the bucket. Column: the part of the bucket that one rank owns.
            edges = start + (end - start) // ranks * np.arange(ranks + 1)
            low = np.maximum(self.starts[first:last, None], edges[None, :-1])
            high = np.minimum(self.ends[first:last, None], edges[None, 1:])
            overlap = np.maximum(high - low, 0)
            elements += overlap.sum(0)
            parameters += (overlap > 0).sum(0)
            largest = np.maximum(largest, overlap.max(0, initial=0))
        return elements, parameters, largest


def stage_state(chunks: Sequence[Sequence[StageParameter]], stage: int, run: Execution) -> list[RankState]:
    """Compute the state of every rank of a stage from the parameters of its chunks (`stage_parameters`)."""
    layout, section, inner = run.layout, run.section, np.arange(run.layout.stage_size)
    dense_ranks, elements = layout.dp * layout.cp, 0
    owned, steps, largest, saved = (np.zeros(len(inner), np.int64) for _ in range(4))
    # Index of a rank in the group that shares its gradients. TrainLayout documents the order of ranks.
    groups = ((False, dense_ranks, inner // layout.tp), (True, layout.edp, inner // (layout.etp * layout.ep)))
    for index, chunk in enumerate(chunks):
        bucket = None
        # Megatron splits buffers into buckets only on the first stage, and there only for the first chunk.
        if section.overlap_grad_reduce and stage == 0 and index == 0:
            bucket = max(SMALLEST_BUCKET, BUCKET_PER_RANK * dense_ranks)
        for expert, ranks, place in groups:
            # Dense parameters and experts are reduced over different groups, so each kind has a buffer of its own.
            trained = [parameter for parameter in chunk if parameter.trained and parameter.expert == expert]
            if not trained:
                continue
            buffer = lay_out(trained, ranks, bucket, aligned=section.distributed_optimizer)
            elements += buffer.elements
            if section.distributed_optimizer:
                rank_elements, parts, most = buffer.owned(ranks)
                owned, steps, saved = owned + rank_elements[place], steps + parts[place], saved + rank_elements[place]
                largest = np.maximum(largest, most[place])
            else:
                owned, steps = owned + buffer.elements, steps + len(trained)
                # All ranks have the whole state, and each writes an equal part.
                saved = saved + buffer.elements // ranks
    parameters = sum(parameter.elements for chunk in chunks for parameter in chunk)
    frozen = sum(parameter.elements for chunk in chunks for parameter in chunk if not parameter.trained)
    return [
        RankState.of(run, parameters, elements, own, frozen=frozen, steps=counters, largest=most, saved=part)
        for own, counters, most, part in zip(
            owned.tolist(), steps.tolist(), largest.tolist(), saved.tolist(), strict=True
        )
    ]


def lay_out(
    parameters: Sequence[StageParameter], ranks: int, bucket_elements: int | None, *, aligned: bool
) -> BufferLayout:
    """Lay out Megatron's buffer, last parameter first. `aligned` adds the padding of the distributed optimizer."""
    to_parameter, to_bucket = (ALIGNED_PARAMETER, lcm(ranks, ALIGNED_BUCKET)) if aligned else (1, 1)
    starts, ends, edges, position = [], [], [0], 0
    for parameter in reversed(parameters):
        # Only the distributed optimizer gives a tied embedding a bucket of its own.
        alone = parameter.own_bucket and aligned
        position = _round_up(position, to_parameter)
        if alone and position > edges[-1]:
            position = _round_up(position, to_bucket)
            edges.append(position)
        starts.append(position)
        position += parameter.elements
        ends.append(position)
        if alone or (bucket_elements is not None and position - edges[-1] >= bucket_elements):
            position = _round_up(position, to_bucket)
            edges.append(position)
    if position > edges[-1]:
        edges.append(_round_up(position, to_bucket))
    return BufferLayout(np.array(starts, np.int64), np.array(ends, np.int64), tuple(pairwise(edges)))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
