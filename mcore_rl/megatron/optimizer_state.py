"""What megatron's optimizers keep of each parameter, found by the parameter, whatever optimizer of 0.16.1 keeps it.

| optimizer | main parameter | this rank holds |
|---|---|---|
| DistributedOptimizer, bfloat16 | float32 copy | a range of the flattened parameter, by data-parallel rank |
| DistributedOptimizer, float32 | the parameter itself | such a range |
| Float16OptimizerWithFloat16Params | float32 copy | all of the parameter, on every data-parallel rank |
| FP32Optimizer | the parameter itself | all of the parameter, on every data-parallel rank |

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
from mcore_rl.megatron.optimizer import materialize_state

cpu.install()

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import (  # noqa: E402
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

# The name that megatron's checkpoints give the main parameter.
MAIN_PARAMETER = "param"


@dataclass(frozen=True)
class HeldState:
    """Live state of elements [start, stop) of the flattened parameter: `tensors` by name, flat: Adam's moments, and
    MAIN_PARAMETER where it is not the parameter itself. `sharded`: other data-parallel ranks hold the other elements;
    else all of them hold the same."""

    start: int
    stop: int
    sharded: bool
    tensors: Mapping[str, torch.Tensor]


def held_state(optimizer: MegatronOptimizer) -> dict[int, HeldState]:
    """By id of the model's parameter. Moments that do not exist before the first update are made: zero."""
    _ensure_moments(optimizer)
    found: dict[int, HeldState] = {}
    for part in _parts(optimizer):
        sharded = isinstance(part, DistributedOptimizer)
        for parameter, main, is_copy in _mains(part):
            start = part._get_model_param_range_map(parameter)["param"].start if sharded else 0
            tensors = {name: value for name, value in part.optimizer.state[main].items() if name != "step"}
            if is_copy:
                tensors[MAIN_PARAMETER] = main
            flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
            assert all(tensor.numel() == main.numel() for tensor in flat.values()), f"unexpected state {list(flat)}"
            found[id(parameter)] = HeldState(start, start + main.numel(), sharded, flat)
    return found


def updates_done(optimizer: MegatronOptimizer) -> int:
    """Adam's step count, the same for every parameter."""
    _ensure_moments(optimizer)
    counts = {int(count) for part in _parts(optimizer) for count in _step_counts(part.optimizer)}
    assert len(counts) <= 1, f"parameters were updated {sorted(counts)} times"
    return counts.pop() if counts else 0


def set_updates_done(optimizer: MegatronOptimizer, count: int) -> None:
    """Sets the step count of every parameter, in the tensor of its own that torch's AdamW gave it: one tensor shared
    by all, as megatron 0.16.1 loads it, would be incremented by each of them."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)
        for group in part.optimizer.param_groups:
            if "step" in group:  # the fused Adams of apex and TransformerEngine count by group
                group["step"] = torch.full_like(group["step"], count) if torch.is_tensor(group["step"]) else count


def _step_counts(inner: torch.optim.Optimizer) -> Iterator[Any]:
    yield from (state["step"] for state in inner.state.values() if "step" in state)
    yield from (group["step"] for group in inner.param_groups if "step" in group)


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers of a chain that have any parameters on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def _ensure_moments(optimizer: MegatronOptimizer) -> None:
    if all(part.optimizer.state for part in _parts(optimizer)):
        return
    materialize_state(optimizer)
    set_updates_done(optimizer, 0)


def _mains(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(the model's parameter, what the inner optimizer updates for it, whether that is a copy)."""
    if isinstance(part, DistributedOptimizer):
        pairs = [(part.model_float16_groups, part.shard_fp32_from_float16_groups, True)]
        pairs.append((part.model_fp32_groups, part.shard_fp32_groups, False))
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = [(part.float16_groups, part.fp32_from_float16_groups, True)]
        pairs.append((part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, False))
    else:
        assert isinstance(part, FP32Optimizer), f"{type(part).__name__} has no place in a checkpoint"
        groups = [group["params"] for group in part.optimizer.param_groups]
        pairs = [(groups, groups, False)]
    for models, mains, is_copy in pairs:
        for model_group, main_group in zip(models, mains, strict=True):
            for parameter, main in zip(model_group, main_group, strict=True):
                yield parameter, main, is_copy
