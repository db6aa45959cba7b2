"""HostOptimizer with an Adam that counts steps per group, like apex and TransformerEngine: all pieces are one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.megatron.optim import host_optimizer
from mcore_rl.megatron.optim.host_optimizer import HostOptimizer
from mcore_rl.megatron.optim.main_params import MainParameter


class GroupAdam(torch.optim.Optimizer):
    """Adam's first moment with bias correction by the step count of the group, which is a number or a tensor."""

    def __init__(self, groups: list[dict[str, Any]], *, tensor: bool) -> None:
        super().__init__(groups, {"lr": 0.1})
        for group in self.param_groups:
            group["step"] = torch.zeros(1) if tensor else 0

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                moment.mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.sub_(group["lr"] * moment / (1 - 0.9 ** float(group["step"])))


def parameters() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    models = [torch.randn(size, generator=generator).bfloat16() for size in (7, 30, 4, 9, 12)]
    return models, [model.float() for model in models]


def two_steps(optimizer: Any, mains: list[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        for main in mains[:-1]:  # the last has no gradient
            main.grad = torch.randn(main.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_host_optimizer_counts_all_pieces_as_one_step(monkeypatch: pytest.MonkeyPatch, tensor: bool) -> None:
    _, whole = parameters()
    on_device = GroupAdam([{"params": whole[:2]}, {"params": whole[2:]}], tensor=tensor)
    two_steps(on_device, whole)

    models, mains = parameters()
    kept = models[-1].clone()
    part = SimpleNamespace(optimizer=GroupAdam([{"params": mains[:2]}, {"params": mains[2:]}], tensor=tensor))
    owned = [MainParameter(model, main, 0, True, True) for model, main in zip(models, mains, strict=True)]
    monkeypatch.setattr(host_optimizer, "main_parameters", lambda _: owned)
    monkeypatch.setattr(host_optimizer, "PIECE_ELEMENTS", 10)
    host = HostOptimizer(part)
    two_steps(host, mains)

    assert [float(group["step"]) for group in host.param_groups] == [2, 2]
    for model, main, expected in zip(models[:-1], mains, whole, strict=False):
        assert torch.equal(host.host_copy(main), expected)
        assert torch.equal(model, expected.bfloat16())
        assert torch.equal(host.state[main]["exp_avg"], on_device.state[expected]["exp_avg"])
    assert torch.equal(models[-1], kept)
