"""Cases of a small actor: two training steps on the policy's batch, and the resulting state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.schema import Config
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import Cases, launch_cases
from tests.tiny_models import write_tiny_model

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def run_cases(worker: Callable[..., dict[str, Any]], cases: Cases, root: Path) -> dict[str, list[dict[str, Any]]]:
    """Run `worker` (rank, directories of models, root, cases) on the ranks. Returns the results of all ranks by case.

    A case: kind of model, dtype, layout, and settings of the actor under `actor`.
    """
    kinds = ("qwen3", "qwen3_moe")
    directories = {kind: str(write_tiny_model(root / kind, kind, num_hidden_layers=4)) for kind in kinds}
    return launch_cases(worker, cases, directories, str(root))


def configure(directory: str, dtype: str, layout: dict[str, Any]) -> Config:
    """Configure an actor with updates large enough to detect differences."""
    config = policy_batch.config(directory, {key: size for key, size in layout.items() if key != "actor"}, 24)
    vars(config.actor).update(layout.get("actor", {}))
    config.model.dtype = dtype
    config.actor.optimizer.lr = 4e-3
    return config


def train_two_steps(actor: Any, between: Callable[[], Any] = lambda: None) -> None:
    """Run two steps with two updates each, and `between` wherever the engine may use the memory."""
    chunks = policy_batch.chunks()
    shares = policy_batch.shares(actor)
    for _ in range(2):
        between()
        batch, _ = actor.recompute_logp(shares, chunks)
        between()
        for index in range(len(shares)):
            actor.update(batch, index)
            # As before a weight sync: whole parameters are read, then everything may be offloaded.
            actor.gather_parameters()
            actor.tensors()
            between()


def held_tensors(actor: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters, main parameters and Adam moments of this rank."""
    from mcore_rl.megatron.optim.optimizer_state import parameter_states

    actor.memory.load("params", "optimizer")
    actor.gather_parameters()
    tensors = {name: tensor.clone() for name, tensor in actor.tensors().items()}
    states = parameter_states(actor.optimizer)
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    for index, state in ((index, states.get(id(parameter))) for index, parameter in enumerate(parameters)):
        if state is not None:
            tensors |= {f"{index}.{name}": tensor.clone() for name, tensor in state.tensors.items()}
    return tensors


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal or exist in only one of the two."""
    assert any(name.endswith("exp_avg_sq") for name in expected)
    return [
        name
        for name in sorted({*expected, *found})
        if name not in expected or name not in found or not torch.equal(expected[name], found[name])
    ]
