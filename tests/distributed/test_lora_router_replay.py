"""Gradients of adapters with imposed experts, compared with PEFT on transformers' model in float64 with the same
experts. Routers are frozen, and every adapter's gradient passes through the experts of later layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import lora, policy_batch
from tests.distributed.gradient_oracle import SMALL, check_gradients, launch_cases
from tests.distributed.test_router_replay import (
    LAYERS,
    SAMPLES,
    GivenExpertsRouter,
    imposed_experts,
    part_of_loss,
    tell,
)

# By number of ranks: layout, recomputation.
CASES: dict[int, dict[str, tuple[dict[str, Any], str]]] = {
    2: {"ep2": ({"ep": 2}, "none"), "fsdp2": ({"strategy": "fsdp2"}, "full")}
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return lora.write_models(tmp_path_factory.mktemp("models"), ["moe"])["moe"]


@pytest.fixture(scope="module")
def results(directory: str) -> dict[str, list[list[Any]]]:
    """Slices of gradients of all ranks, by case."""
    return launch_cases(_worker, CASES, directory)


def _worker(rank: int, directory: str, cases: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: _gradients(rank, directory, *settings) for name, settings in cases.items()}


def _gradients(rank: int, directory: str, parallel: dict[str, Any], recompute: str) -> list[Any]:
    config = lora.lora_config("moe", directory, parallel, SMALL)
    config.actor.moe.router_replay, config.actor.recompute = "policy", recompute
    actor = policy_batch.build_actor(config)
    batch, _ = actor.recompute_logp(policy_batch.shares(actor), policy_batch.chunks())
    for sample, logp in batch.old_logp.items():
        logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, rank)])
    actor.routing.impose(imposed_experts())
    with policy_batch.complete_gradients(actor):
        actor.accumulate_gradients(batch, 1)
    return lora.adapter_pieces(actor, gradients=True)


@pytest.fixture(scope="module")
def reference(directory: str) -> dict[str, dict[str, torch.Tensor]]:
    """PEFT's gradients with the routers' own experts (`free`) and with imposed experts."""
    model = lora.peft_model(directory, Path(directory) / "adapter")
    gates = [GivenExpertsRouter(layer.mlp.gate) for layer in model.base_model.model.model.layers]
    with torch.no_grad():
        old = {
            sample: policy_batch.reference_logp(model, sample)[0]
            + torch.from_numpy(policy_batch.drift(sample)).double()
            for sample in SAMPLES
        }
    imposed = {sample: torch.from_numpy(experts.astype(np.int64)) for sample, experts in imposed_experts().items()}
    found = {}
    for name, routing in (("free", dict.fromkeys(SAMPLES, [None] * LAYERS)), ("imposed", imposed)):
        model.zero_grad()
        for sample in SAMPLES:
            tell(gates, routing[sample])
            part_of_loss(model, sample, old).backward()
        found[name] = lora.named({key: p.grad.clone() for key, p in model.named_parameters() if "lora_" in key})
    return found


@pytest.mark.parametrize("case", CASES[2])
def test_lora_gradients_with_imposed_experts_equal_peft(case: str, results: Any, reference: Any) -> None:
    check_gradients(results[case], reference["imposed"])
    first_layer = [name for name in reference["free"] if ".layers.0." in name]
    for name in first_layer:
        change = (reference["imposed"][name] - reference["free"][name]).abs().max()
        assert change > 1e-3 * reference["free"][name].abs().max(), name
