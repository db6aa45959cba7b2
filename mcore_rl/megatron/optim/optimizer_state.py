"""Optimizer state by parameter, for all optimizers of megatron-core 0.16.1.

With ep > 1, experts have a separate optimizer in a ChainedOptimizer, so the number of optimizers depends on the layout.
Megatron's own state_dict is nested by optimizer and cannot be loaded in a layout with another number of optimizers
("Expected 2 entries in state dict, but got 4"). State by parameter has no such nesting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from mcore_rl.megatron.model.shards import shard_dtype
from mcore_rl.megatron.optim.host_optimizer import HostOptimizer
from mcore_rl.megatron.optim.main_params import MainParameter, main_parameters, optimizer_parts

MAIN_PARAMETER = "param"  # the name of the main parameter in Megatron's checkpoints


class ParameterState(NamedTuple):
    """Optimizer state of the elements of a parameter that the optimizer owns.

    tensors: flat tensors by name, sharing memory with the optimizer: Adam's moments, and MAIN_PARAMETER unless it is
    the parameter itself in the dtype of the weights. They are in host memory with actor.optimizer.cpu_offload.
    """

    owned: MainParameter
    tensors: Mapping[str, torch.Tensor]


def parameter_states(optimizer: MegatronOptimizer) -> dict[int, ParameterState]:
    """State of each parameter by the id of the model's tensor. Creates missing moments (zero) before the first
    update."""
    _ensure_moments(optimizer)
    states: dict[int, ParameterState] = {}
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        for owned in main_parameters(part):
            tensors = {name: value for name, value in inner.state[owned.main].items() if name != "step"}
            if owned.is_copy:
                on_host = isinstance(inner, HostOptimizer)
                tensors[MAIN_PARAMETER] = inner.host_copy(owned.main) if on_host else owned.main
            elif shard_dtype(owned.model) != owned.main.dtype:
                # The weight in a checkpoint is rounded.
                tensors[MAIN_PARAMETER] = owned.main
            flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
            assert all(tensor.numel() == owned.main.numel() for tensor in flat.values()), f"wrong size in {list(flat)}"
            # By id, because tensors compare by element.
            states[id(owned.model)] = ParameterState(owned, flat)
    return states


def updates_done(optimizer: MegatronOptimizer) -> int:
    """Return Adam's step count, which is the same for all parameters."""
    _ensure_moments(optimizer)
    counts = {int(count) for part in optimizer_parts(optimizer) for count in _step_counts(part.optimizer)}
    assert len(counts) <= 1, f"parameters have different step counts: {sorted(counts)}"
    return counts.pop() if counts else 0


def set_updates_done(optimizer: MegatronOptimizer, count: int) -> None:
    """Set the step count of every parameter in place. torch's AdamW has one count tensor per parameter; loading by
    megatron-core 0.16.1 shares one tensor among them, which is then incremented once per parameter."""
    for part in optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)
        for group in part.optimizer.param_groups:
            if "step" in group:  # fused Adam of apex and TransformerEngine has one count per group
                group["step"] = torch.full_like(group["step"], count) if torch.is_tensor(group["step"]) else count


def _step_counts(inner: torch.optim.Optimizer) -> Iterator[torch.Tensor | int]:
    yield from (state["step"] for state in inner.state.values() if "step" in state)
    yield from (group["step"] for group in inner.param_groups if "step" in group)


def _ensure_moments(optimizer: MegatronOptimizer) -> None:
    """Create Adam's moments (zero) before the first update, so that a checkpoint can be loaded into them.

    Main parameters keep their values: the step that creates the moments has learning rate and weight decay 0.
    """
    missing = [part.optimizer for part in optimizer_parts(optimizer) if not part.optimizer.state]
    for inner in missing:
        kept = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        everything = [[main for group in inner.param_groups for main in group["params"]]]
        for mains in inner.pieces() if isinstance(inner, HostOptimizer) else everything:
            for main in mains:
                main.grad = torch.zeros(main.shape, dtype=main.dtype, device=main.device)
            inner.step()
            inner.zero_grad()
        for group, (rate, decay) in zip(inner.param_groups, kept, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
    if missing:
        set_updates_done(optimizer, 0)
