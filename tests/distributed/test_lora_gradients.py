"""Gradients of one update of a LoRA run, matrix by matrix, in every layout and division into micro-batches, compared
with PEFT on transformers' model.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_rl.config.models import MoeConfig
from tests.distributed import lora, policy_batch
from tests.distributed.gradient_oracle import (
    SMALL,
    accumulate,
    case_parameters,
    check_gradients,
    launch_cases,
)
from tests.selection import usual_cases

EVERY_CASE: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {
        "dense split": ("dense", {}, SMALL),
        "biased split": ("biased", {}, SMALL),
        "moe split": ("moe", {}, SMALL),
        "v3 without query latent": ("v3 without query latent", {}, SMALL),
        "some recomputed": ("some", {}, SMALL, {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}),
        "biased fsdp2 recomputed": ("biased", {"strategy": "fsdp2"}, SMALL, {"recompute": "full"}),
        "v3 recomputed": ("v3", {}, SMALL, {"recompute": "selective", "recompute_modules": ["moe", "mla_up_proj"]}),
    },
    2: {
        "dense dp2": ("dense", {}, SMALL),
        "dense tp2 without sp": ("dense", {"tp": 2, "sequence_parallel": False}, SMALL),
        "dense pp2": ("dense", {"pp": 2}, SMALL),
        # The first chunk is the embedding alone: it has no adapter.
        "dense pp2 layout": ("dense", {"pp": 2, "pipeline_layout": "E|tt|t|tL"}, SMALL),
        "some sharded": ("some", {"shard_parameters": True}, SMALL),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL),
        "some fsdp2 recomputed": ("some", {"strategy": "fsdp2"}, SMALL, {"recompute": "full"}),
        "odd fsdp2": ("odd", {"strategy": "fsdp2"}, SMALL),
        "moe fsdp2": ("moe", {"strategy": "fsdp2"}, SMALL),
        "v3 fsdp2 recomputed": ("v3", {"strategy": "fsdp2"}, SMALL, {"recompute": "full"}),
        "dense cp2": ("dense", {"cp": 2}, SMALL),
        "some tp2": ("some", {"tp": 2}, SMALL),
        "odd tp2 without sp": ("odd", {"tp": 2, "sequence_parallel": False}, SMALL),
        "linear attention tp2 without sp": ("linear attention", {"tp": 2, "sequence_parallel": False}, SMALL),
        "moe ep2": ("moe", {"ep": 2}, SMALL),
        "moe tp2": ("moe", {"tp": 2}, SMALL),
        "v3 ep2": ("v3", {"ep": 2}, SMALL),
        "v3 pp2": ("v3", {"pp": 2}, SMALL),
        "v3 cp2": ("v3", {"cp": 2}, SMALL),
        "v3 tp2 recomputed": ("v3", {"tp": 2}, SMALL, {"recompute": "full"}),
        "dense tp2 replicated": ("dense", {"tp": 2}, SMALL, {"distributed_optimizer": False}),
    },
    4: {
        "v3 tp2 pp2": ("v3", {"tp": 2, "pp": 2}, SMALL),
        "v3 tp2 sharded": ("v3", {"tp": 2, "shard_parameters": True}, SMALL, {"recompute": "full"}),
        "v3 tp2 ep4": ("v3", {"tp": 2, "ep": 4}, SMALL),
    },
}
USUAL = {
    "dense split",
    "v3 recomputed",
    "biased fsdp2 recomputed",
    "dense dp2",
    "dense pp2 layout",
    "some sharded",
    "v3 fsdp2 recomputed",
    "odd tp2 without sp",
    "linear attention tp2 without sp",
    "moe ep2",
    "v3 cp2",
    "some tp2",
}
"""Cases that are always tested: each axis, and each special part of a model, once."""
CASES = usual_cases(EVERY_CASE, USUAL)
ROUTED = MoeConfig(load_balancing="seq_aux_loss", aux_loss_coefficient=0.5, z_loss_coefficient=0.1)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    used = {case[0] for of_size in CASES.values() for case in of_size.values()} | {"moe"}
    return lora.write_models(tmp_path_factory.mktemp("models"), sorted(used))


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    return {name: lora.peft_gradients(directory, policy_batch.UPDATES[0]) for name, directory in directories.items()}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[tuple[float, list[Any]]]]:
    """Loss and slices of gradients of all ranks, by case."""
    return launch_cases(_worker, CASES, directories)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_lora_gradients_in_every_layout_equal_peft(size: int, case: str, results: Any, references: Any) -> None:
    expected_loss, expected = references[CASES[size][case][0]]
    assert sum(loss for loss, _ in results[case]) == pytest.approx(expected_loss, rel=1e-5)
    check_gradients([pieces for _, pieces in results[case]], expected)


def test_lora_router_losses_are_equal_in_every_layout(directories: dict[str, str], references: Any) -> None:
    """Routers are frozen, but their losses reach the adapters through their inputs."""
    layouts = {1: {"one": {}}, 2: {"tp2": {"tp": 2}, "ep2": {"ep": 2}, "fsdp2": {"strategy": "fsdp2"}}}
    cases = {
        size: {name: ("moe", parallel, SMALL, {"moe": ROUTED}) for name, parallel in of_size.items()}
        for size, of_size in layouts.items()
    }
    found = {name: [pieces for _, pieces in ranks] for name, ranks in launch_cases(_worker, cases, directories).items()}
    one = policy_batch.assemble(found["one"])
    for name in layouts[2]:
        check_gradients(found[name], one)
    first_layer = [name for name in one if ".layers.0." in name]
    without = references["moe"][1]
    assert all((one[name] - without[name]).abs().max() > 1e-3 * without[name].abs().max() for name in first_layer)


def _worker(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, (model, parallel, tokens, *settings) in cases.items():
        config = lora.lora_config(model, directories[model], parallel, tokens)
        vars(config.actor).update(*settings)
        actor = policy_batch.build_actor(config)
        loss, _ = accumulate(actor)
        results[name] = loss, lora.adapter_pieces(actor, gradients=True)
    return results
