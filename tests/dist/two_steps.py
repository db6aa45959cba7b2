"""Two training steps on the policy's batch, and all that they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.dist import policy_batch


def train_two_steps(actor: Any, between: Callable[[], Any] = lambda: None) -> None:
    """Two steps of two updates each, with `between` wherever the engine may want the memory."""
    chunks = policy_batch.chunks()
    dp = actor.layout.coordinates(actor.rank).dp
    shares = [policy_batch.share(samples, dp, actor.layout.dp) for samples in policy_batch.UPDATES]
    for _ in range(2):
        between()
        actor.annotate(shares, chunks)
        between()
        for index, share in enumerate(shares):
            actor.update(share, chunks, index)
            # As before a sync: whole parameters are read, then all may leave.
            actor.gather_parameters()
            actor.tensors()
            between()


def held_tensors(actor: Any) -> dict[str, torch.Tensor]:
    """Copies of every parameter, main parameter and Adam moment that this rank holds."""
    from mcore_rl.megatron.optimizer_state import held_state

    actor.memory.load("params", "optimizer")
    actor.gather_parameters()
    tensors = {name: tensor.clone() for name, tensor in actor.tensors().items()}
    states = held_state(actor.optimizer)
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    for index, state in ((index, states.get(id(parameter))) for index, parameter in enumerate(parameters)):
        if state is not None:
            tensors |= {f"{index}.{name}": tensor.clone() for name, tensor in state.tensors.items()}
    return tensors


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal to the bit, or only in one."""
    assert any(name.endswith("exp_avg_sq") for name in expected)
    return [
        name
        for name in sorted({*expected, *found})
        if name not in expected or name not in found or not torch.equal(expected[name], found[name])
    ]
