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
from tests.distributed.launch import launch

# See test_actor_gradients.
TOLERANCE = 1e-5
ONE_MICROBATCH, SMALL = 10_000, 24
CASES: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {
        "dense": ("dense", {}, ONE_MICROBATCH),
        "dense split": ("dense", {}, SMALL),
        "biased split": ("biased", {}, SMALL),
        "some split": ("some", {}, SMALL),
        "moe split": ("moe", {}, SMALL),
        "v3 split": ("v3", {}, SMALL),
        "v3 without query latent": ("v3 without query latent", {}, SMALL),
        "dense recomputed": ("dense", {}, SMALL, {"recompute": "full"}),
        "some recomputed": ("some", {}, SMALL, {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}),
        "v3 recomputed": ("v3", {}, SMALL, {"recompute": "selective", "recompute_modules": ["moe", "mla_up_proj"]}),
    },
    2: {
        "dense dp2": ("dense", {}, SMALL),
        "dense tp2": ("dense", {"tp": 2}, SMALL),
        "dense tp2 without sp": ("dense", {"tp": 2, "sequence_parallel": False}, SMALL),
        "dense pp2": ("dense", {"pp": 2}, SMALL),
        "dense pp2 vpp2": ("dense", {"pp": 2, "vpp": 2}, SMALL),
        # The first chunk is the embedding alone: it has no adapter.
        "dense pp2 layout": ("dense", {"pp": 2, "pipeline_layout": "E|tt|t|tL"}, SMALL),
        "dense cp2": ("dense", {"cp": 2}, SMALL),
        "biased pp2": ("biased", {"pp": 2}, SMALL),
        "some tp2": ("some", {"tp": 2}, SMALL),
        "some tp2 without sp": ("some", {"tp": 2, "sequence_parallel": False}, SMALL),
        "odd tp2": ("odd", {"tp": 2}, SMALL),
        "odd tp2 without sp": ("odd", {"tp": 2, "sequence_parallel": False}, SMALL),
        "moe ep2": ("moe", {"ep": 2}, SMALL),
        "moe tp2": ("moe", {"tp": 2}, SMALL),
        "moe pp2": ("moe", {"pp": 2}, SMALL),
        "v3 tp2": ("v3", {"tp": 2}, SMALL),
        "v3 ep2": ("v3", {"ep": 2}, SMALL),
        "v3 pp2": ("v3", {"pp": 2}, SMALL),
        "v3 cp2": ("v3", {"cp": 2}, SMALL),
        "v3 tp2 recomputed": ("v3", {"tp": 2}, SMALL, {"recompute": "full"}),
        "dense tp2 replicated": ("dense", {"tp": 2}, SMALL, {"distributed_optimizer": False}),
    },
    4: {
        "dense tp2 pp2": ("dense", {"tp": 2, "pp": 2}, SMALL),
        "v3 tp2 pp2": ("v3", {"tp": 2, "pp": 2}, SMALL),
        "v3 tp2 ep4": ("v3", {"tp": 2, "ep": 4}, SMALL),
    },
}
ROUTED = MoeConfig(load_balancing="seq_aux_loss", aux_loss_coefficient=0.5, z_loss_coefficient=0.1)
ALL_CASES = [pytest.param(size, name, id=name) for size, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return lora.write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    return {name: lora.peft_gradients(directory, policy_batch.UPDATES[0]) for name, directory in directories.items()}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """By case: the loss, and the gradients assembled from the slices of all ranks."""
    joined = {}
    for size, cases in CASES.items():
        ranks = launch(_worker, size, directories, cases, timeout_seconds=300)
        for name in cases:
            parts = [rank[name] for rank in ranks]
            joined[name] = (sum(loss for loss, _ in parts), policy_batch.assemble([pieces for _, pieces in parts]))
    return joined


@pytest.mark.parametrize(("size", "case"), ALL_CASES)
def test_lora_gradients_in_every_layout_equal_peft(size: int, case: str, results: Any, references: Any) -> None:
    expected_loss, expected = references[CASES[size][case][0]]
    loss, gradients = results[case]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    errors = {
        name: float((gradients[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items()
    }
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, f"{len(wrong)} of {len(errors)}, the worst {max(wrong.items(), key=lambda item: item[1])}"


def test_lora_router_losses_are_equal_in_every_layout(directories: dict[str, str], references: Any) -> None:
    """Routers are frozen, but their losses reach the adapters through their inputs."""
    found = {}
    for size, parallel in ((1, {}), (2, {"tp": 2}), (2, {"ep": 2})):
        ranks = launch(_worker, size, directories, {"moe": ("moe", parallel, SMALL, {"moe": ROUTED})})
        found[str(parallel)] = policy_batch.assemble([rank["moe"][1] for rank in ranks])
    one = found.pop("{}")
    for parallel, gradients in found.items():
        for name, tensor in one.items():
            assert (gradients[name] - tensor).abs().max() <= TOLERANCE * tensor.abs().max(), f"{parallel} {name}"
    first_layer = [name for name in one if ".layers.0." in name]
    without = references["moe"][1]
    assert all((one[name] - without[name]).abs().max() > 1e-3 * without[name].abs().max() for name in first_layer)


def _worker(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.actor import MegatronActor

    results = {}
    samples = policy_batch.UPDATES[0]
    for name, (model, parallel, tokens, *settings) in cases.items():
        config = lora.lora_config(model, directories[model], parallel, tokens)
        for key, value in dict(*settings).items():
            setattr(config.actor, key, value)
        actor = MegatronActor(config, rank, dist.get_world_size(), None)
        chunks = policy_batch.chunks()
        dp = actor.layout.coordinates(rank).dp
        share = policy_batch.share(samples, dp, actor.layout.dp)
        first = policy_batch.share(policy_batch.UPDATES[1], dp, actor.layout.dp)
        batch, _ = actor.recompute_logp([first, share], chunks)  # like a second update, with old log-probabilities
        for sample, logp in batch.old_logp.items():
            logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, rank)])
        _, reports = actor.accumulate_gradients(batch, 1, on_every_replica=True)
        counted = actor.layout.coordinates(rank).tp == 0
        loss = sum(report.loss for report in reports) * counted
        results[name] = loss, lora.adapter_pieces(actor, gradients=True)
    return results
