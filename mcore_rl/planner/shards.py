"""Training state of a rank with sharded parameters (parallel.shard_parameters), to the byte, and gathered layers.

- A rank stores rows of every parameter, by the rule of torch.chunk. Every rank has memory for as many rows as
  the first rank, whose shard is the largest. Trained shards are float32, others have the dtype of the weights. A row of
  transformers' stacked experts (strategy fsdp2) is an expert.
- Two float32 moments cover the rank's own rows. Gradients are float32 and exist during an update only.
- Megatron's optimizer needs no copy of float32 shards.
- Adapters of a LoRA run are not sharded.

Gathered parameters have the dtype of the weights. A pass holds the parameters outside of layers, two layers, and the
buffer from which one of them was copied. A backward pass adds the gradients of the parameters outside of layers and of
one layer, and two float32 buffers of layers whose gradients are reduced; gradients outside of layers are reduced last.
This part is an estimate: it depends on the overlap of streams.

Source: torch.distributed.fsdp._fully_shard (2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mcore_rl.planner.layers.execution import Execution
from mcore_rl.planner.state import GRADIENT_BYTES, STEP_BYTES, RankState, StageParameter, stage_state
from model_converters.mapping.placement import chunk_range

MASTER_BYTES, MOMENT_BYTES = 4, 8
"""Bytes of an element of a trained shard, and of its two moments."""


def sharded_state(parameters: Sequence[StageParameter], run: Execution) -> list[RankState]:
    """Compute the state of every rank from the parameters of the only chunk."""
    base = [parameter for parameter in parameters if not parameter.trained]
    if not base:
        return _shards(parameters, run)
    # Weights under adapters: only these are trained, and Megatron's buffers have them whole.
    adapters = stage_state([[parameter for parameter in parameters if parameter.trained]], 0, run)
    return [
        replace(
            shards,
            parameters=shards.parameters + own.parameters,
            weights_bytes=shards.weights_bytes + own.weights_bytes,
            gradients_bytes=own.gradients_bytes,
            optimizer_bytes=own.optimizer_bytes,
            checkpoint_bytes=own.checkpoint_bytes,
            keeps_gradients=True,
        )
        for shards, own in zip(_shards(base, run), adapters, strict=True)
    ]


def _shards(parameters: Sequence[StageParameter], run: Execution) -> list[RankState]:
    forward, update = _gathered_bytes(parameters, run.element_bytes)
    states = []
    for rank in range(run.layout.world_size):
        held = trained = weights = copy = gradients = 0
        for parameter in parameters:
            own, stored = _rows_of(parameter, run, rank)
            held += own
            copy += stored * run.element_bytes
            weights += stored * (MASTER_BYTES if parameter.trained else run.element_bytes)
            gradients += stored * GRADIENT_BYTES if parameter.trained else 0
            trained += own if parameter.trained else 0
        # On GPUs the optimizer is not torch's own, which counts the steps of each parameter.
        counters = 0 if run.cuda else STEP_BYTES * sum(parameter.trained for parameter in parameters)
        states.append(
            RankState(
                held,
                weights,
                gradients,
                trained * MOMENT_BYTES + counters,
                checkpoint_bytes=trained * (run.element_bytes + run.optimizer_bytes),
                keeps_gradients=False,
                copy_bytes=copy,
                gathered_forward_bytes=forward,
                gathered_update_bytes=update,
            )
        )
    return states


def _rows_of(parameter: StageParameter, run: Execution, rank: int) -> tuple[int, int]:
    """Return the elements of a parameter that a rank holds, and for which it has memory."""
    layout, at = run.layout, run.layout.coordinates(rank)
    part, num_parts = at.cp + layout.cp * at.dp, layout.cp * layout.dp
    if parameter.expert:
        part, num_parts = at.edp, layout.edp
    first, end = chunk_range(parameter.rows, part, num_parts)
    row = parameter.elements // parameter.rows
    return (end - first) * row, chunk_range(parameter.rows, 0, num_parts)[1] * row


def _gathered_bytes(parameters: Sequence[StageParameter], element_bytes: int) -> tuple[int, int]:
    """Return the bytes of gathered parameters in a forward pass, and of these and unreduced gradients in an update."""
    sizes, trained = Counter[str](), Counter[str]()
    for parameter in parameters:
        sizes[parameter.layer] += parameter.elements
        trained[parameter.layer] += parameter.elements if parameter.trained else 0
    outside, outside_trained = sizes.pop("", 0), trained.pop("", 0)
    layer, layer_trained = max(sizes.values(), default=0), max(trained.values(), default=0)
    forward = (outside + 3 * layer) * element_bytes
    layer_gradients = layer_trained * (element_bytes + 2 * GRADIENT_BYTES)
    gradients = outside_trained * element_bytes + max(layer_gradients, outside_trained * GRADIENT_BYTES)
    return forward, forward + gradients
