"""What megatron's optimizers keep of each parameter, found by the parameter, whatever optimizer of 0.16.1 keeps it.

Experts have an optimizer of their own where ep > 1 (a ChainedOptimizer), so the number of optimizers depends on the
layout, and megatron's own state_dict, which is nested by it, does not load into another ("Expected 2 entries in state
dict, but got 4": the four keys of one optimizer where two optimizers were wanted). By parameter there is no nesting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.megatron import cpu
from mcore_rl.megatron.optim.host_optimizer import HostOptimizer
from mcore_rl.megatron.optim.main_params import main_parameters, optimizer_parts
from mcore_rl.megatron.optim.optimizer import materialize_state

cpu.install()

from megatron.core.optimizer.optimizer import MegatronOptimizer  # noqa: E402

# The name that megatron's checkpoints give the main parameter.
MAIN_PARAMETER = "param"


@dataclass(frozen=True)
class HeldState:
    """Live state of elements [start, stop) of the flattened parameter: `tensors` by name, flat: Adam's moments, and
    MAIN_PARAMETER where it is not the parameter itself. They are in host memory with actor.optimizer.cpu_offload.
    `sharded`: other data-parallel ranks hold the other elements; else all of them hold the same."""

    start: int
    stop: int
    sharded: bool
    tensors: Mapping[str, torch.Tensor]


def held_state(optimizer: MegatronOptimizer) -> dict[int, HeldState]:
    """By id of the model's parameter. Moments that do not exist before the first update are made: zero."""
    _ensure_moments(optimizer)
    states: dict[int, HeldState] = {}
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        for owned in main_parameters(part):
            tensors = {name: value for name, value in inner.state[owned.main].items() if name != "step"}
            if owned.is_copy:
                on_host = isinstance(inner, HostOptimizer)
                tensors[MAIN_PARAMETER] = inner.host_copy(owned.main) if on_host else owned.main
            flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
            stop = owned.start + owned.main.numel()
            assert all(tensor.numel() == stop - owned.start for tensor in flat.values()), f"unexpected: {list(flat)}"
            states[id(owned.model)] = HeldState(owned.start, stop, owned.sharded, flat)
    return states


def updates_done(optimizer: MegatronOptimizer) -> int:
    """Adam's step count, the same for every parameter."""
    _ensure_moments(optimizer)
    counts = {int(count) for part in optimizer_parts(optimizer) for count in _step_counts(part.optimizer)}
    assert len(counts) <= 1, f"parameters were updated {sorted(counts)} times"
    return counts.pop() if counts else 0


def set_updates_done(optimizer: MegatronOptimizer, count: int) -> None:
    """Sets the step count of every parameter, in the tensor of its own that torch's AdamW gave it: one tensor shared
    by all, as megatron 0.16.1 loads it, would be incremented by each of them."""
    for part in optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)
        for group in part.optimizer.param_groups:
            if "step" in group:  # the fused Adams of apex and TransformerEngine count by group
                group["step"] = torch.full_like(group["step"], count) if torch.is_tensor(group["step"]) else count


def _step_counts(inner: torch.optim.Optimizer) -> Iterator[Any]:
    yield from (state["step"] for state in inner.state.values() if "step" in state)
    yield from (group["step"] for group in inner.param_groups if "step" in group)


def _ensure_moments(optimizer: MegatronOptimizer) -> None:
    if all(part.optimizer.state for part in optimizer_parts(optimizer)):
        return
    materialize_state(optimizer)
    set_updates_done(optimizer, 0)
