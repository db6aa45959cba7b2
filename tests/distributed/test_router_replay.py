"""Router replay: experts chosen by the old policy are used in updates, with other micro-batches and in every layout.
Recorded experts and all gradients are compared with transformers' model in float64 with given experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.types import TrajectoryBuffers, merge_metrics
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import SMALL, check_gradients, launch_cases
from tests.distributed.launch import RankFailedError, launch
from tests.distributed.test_router_losses import len_computed
from tests.tiny_models import checkpoint_tensors, write_tiny_model

SAMPLES = policy_batch.UPDATES[1]  # in the second update; the first starts from the old policy
ALIKE = 3
LAYERS = 4
# By number of ranks: layout, recomputation.
CASES: dict[int, dict[str, tuple[dict[str, Any], str]]] = {
    1: {"one": ({}, "full")},
    2: {
        "tp2": ({"tp": 2}, "full"),
        "ep2": ({"ep": 2}, "none"),
        "cp2": ({"cp": 2}, "none"),
        "pp2 vpp2": ({"pp": 2, "vpp": 2}, "full"),
        "fsdp2": ({"strategy": "fsdp2"}, "full"),
    },
}
NAMES = [name for cases in CASES.values() for name in cases]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def results(directory: str) -> dict[str, list[dict[str, Any]]]:
    return launch_cases(_worker, CASES, directory)


def imposed_experts() -> dict[int, np.ndarray]:
    """Experts that no router would choose: [layers, tokens, 2] by sample."""
    generator = np.random.default_rng(5)
    return {
        sample: generator.random((LAYERS, len_computed(sample), 8)).argsort(-1)[..., :2].astype(np.uint8)
        for sample in range(len(policy_batch.PROMPTS))
    }


def _worker(rank: int, directory: str, cases: dict[str, Any]) -> dict[str, Any]:
    return {name: _replayed(rank, directory, *settings) for name, settings in cases.items()}


def _replayed(rank: int, directory: str, parallel: dict[str, Any], recompute: str) -> dict[str, Any]:
    config = policy_batch.config(directory, parallel, SMALL)
    config.actor.moe.router_replay, config.actor.recompute = "policy", recompute
    actor = policy_batch.build_actor(config)
    shares, chunks = policy_batch.shares(actor), policy_batch.chunks()
    batch, _ = actor.recompute_logp(shares, chunks)
    recorded = {sample: ids.numpy().copy() for sample, ids in actor.routing.by_sample.items()}
    actor.update(batch, 0)  # its forward pass is the old policy's pass for its samples
    kept = sorted(actor.routing.by_sample)
    _restore(actor)
    # Other weights and micro-batches: without replay, the routers would choose the least likely experts.
    for name, tensor in actor.tensors().items():
        if name.endswith(("router.weight", "mlp.gate.weight")):
            tensor.neg_()
    for sample, logp in batch.old_logp.items():
        if sample in SAMPLES:
            logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, rank)])
    actor.packing = replace(actor.packing, tokens=40)
    found = {"recorded": recorded, "layers": actor.routing.layers, "kept": kept}
    found["replayed"] = _gradients(actor, batch)
    actor.routing.impose(imposed_experts())
    found["imposed"] = _gradients(actor, batch)
    _restore(actor)
    config.actor.moe.router_replay = "engine"
    batch, found["metrics"] = actor.recompute_logp(
        shares, _with_engines_experts(chunks, actor.routing.layers, recorded)
    )
    actor.accumulate_gradients(batch, 0)  # the old policy's pass for these samples
    # By sample: mask of its trained tokens on this rank, and their log-probabilities.
    held = {sample: policy_batch.held(sample, actor.layout, rank) for sample in batch.old_logp}
    found["engine"] = {sample: (held[sample], logp.numpy()) for sample, logp in batch.old_logp.items()}
    return found


def _with_engines_experts(
    chunks: list[TrajectoryBuffers], layers: list[int], recorded: dict[int, np.ndarray]
) -> list[TrajectoryBuffers]:
    """Trajectories with imposed experts, except for sample ALIKE, which has the policy's; tokens that the trainer does
    not compute have invalid experts."""
    imposed, numbers = imposed_experts(), iter(range(len(policy_batch.PROMPTS)))
    if ALIKE in recorded:
        imposed[ALIKE][layers] = recorded[ALIKE]
    made = []
    for buffers in chunks:
        experts = np.full((len(buffers.tokens), LAYERS, 2), 255, np.uint8)
        for start in buffers.token_offsets[:-1]:
            rows = imposed[next(numbers)].swapaxes(0, 1)
            experts[start : start + len(rows)] = rows
        made.append(replace(buffers, routed_experts=experts))
    return made


def _restore(actor: Any) -> None:
    """Restore the loaded weights."""
    from mcore_rl.megatron.model.loading import load_hf

    load_hf(actor.chunks, actor.config.model.hf_path, actor.layout)


def _gradients(actor: Any, batch: Any) -> list[Any]:
    with policy_batch.complete_gradients(actor):
        actor.accumulate_gradients(batch, 1)
    return policy_batch.gradient_pieces(actor)


class GivenExpertsRouter:
    """transformers' router with given experts: [tokens, k]."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate
        self.experts: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        gate.forward = self.forward

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.gate.weight.t()
        own = logits.topk(self.gate.top_k, -1).indices
        self.own, experts = own, own.clone()
        if self.experts is not None:
            experts[: len(self.experts)] = self.experts
        return logits, logits.gather(1, experts).softmax(-1), experts


@pytest.fixture(scope="module")
def reference(directory: str) -> dict[str, Any]:
    """Recorded experts by sample; gradients of the second update with recorded and with imposed experts;
    log-probabilities of all samples with the routers' own experts (`free`) and with imposed experts (`told`)."""
    model: Any = policy_batch.reference_model(directory)
    gates = [GivenExpertsRouter(layer.mlp.gate) for layer in model.model.layers]
    old, recorded, free, told = {}, {}, {}, {}
    imposed = {sample: torch.from_numpy(ids.astype(np.int64)) for sample, ids in imposed_experts().items()}
    with torch.no_grad():
        for sample in range(len(policy_batch.PROMPTS)):
            drift = torch.from_numpy(policy_batch.drift(sample)).double()
            free[sample] = policy_batch.reference_logp(model, sample)[0]
            old[sample] = free[sample] + drift
            recorded[sample] = torch.stack([gate.own[: len_computed(sample)] for gate in gates])
            tell(gates, recorded[sample] if sample == ALIKE else imposed[sample])
            told[sample] = policy_batch.reference_logp(model, sample)[0]
            tell(gates, [None] * LAYERS)
        for gate in gates:
            gate.gate.weight.neg_()
    found: dict[str, Any] = {"recorded": recorded, "free": free, "told": told}
    for name, routing in (("replayed", recorded), ("imposed", imposed)):
        model.zero_grad()
        for sample in SAMPLES:
            tell(gates, routing[sample])
            part_of_loss(model, sample, old).backward()
        found[name] = checkpoint_tensors(model, {n: p.grad.clone() for n, p in model.named_parameters()})
    return found


def tell(gates: list[GivenExpertsRouter], routing: Any) -> None:
    for gate, experts in zip(gates, routing, strict=True):
        gate.experts = experts


def part_of_loss(model: Any, sample: int, old: dict[int, torch.Tensor]) -> torch.Tensor:
    """Compute one sample's term of the update's loss, with the weights of the whole update."""
    weights = policy_batch.loss_weights
    try:
        policy_batch.loss_weights = lambda _: weights(list(SAMPLES))
        return policy_batch.reference_loss(model, [sample], old)[0]
    finally:
        policy_batch.loss_weights = weights


@pytest.mark.parametrize("routing", ["replayed", "imposed"])
@pytest.mark.parametrize("case", NAMES)
def test_replay_gradients_equal_transformers_with_given_experts(
    case: str, routing: str, results: Any, reference: Any
) -> None:
    expected = reference[routing]
    check_gradients([rank[routing] for rank in results[case]], expected)
    assert all(float(expected[f"model.layers.{layer}.mlp.gate.weight"].abs().max()) > 0 for layer in range(LAYERS))


@pytest.mark.parametrize("case", NAMES)
def test_replay_records_experts_of_old_policy_by_sample(case: str, results: Any, reference: Any) -> None:
    seen = set()
    for rank in results[case]:
        for sample, ids in rank["recorded"].items():
            assert ids.dtype == np.uint8
            expected = reference["recorded"][sample].sort(-1).values.numpy()[rank["layers"]]
            np.testing.assert_array_equal(np.sort(ids, -1), expected)
            seen |= {(sample, layer) for layer in rank["layers"]}
    assert seen == {(sample, layer) for sample in SAMPLES for layer in range(LAYERS)}


def test_replay_in_later_epochs_uses_experts_of_first_update(results: Any) -> None:
    assert results["one"][0]["kept"] == sorted(range(len(policy_batch.PROMPTS)))


@pytest.mark.parametrize("case", NAMES)
def test_replay_of_engine_applies_to_old_policy(case: str, results: Any, reference: Any) -> None:
    """Compare each token, for samples with recomputed log-probabilities and for samples of the first update."""
    seen: dict[int, np.ndarray] = {}
    for rank in results[case]:
        for sample, (held, logp) in rank["engine"].items():
            # float32, of values up to 14; the routers' own experts change them by more than 1e-3.
            np.testing.assert_allclose(logp, reference["told"][sample].numpy()[held], atol=1e-5)
            seen[sample] = seen.get(sample, 0) + held.astype(int)
    assert seen.keys() == reference["told"].keys()
    assert all((count > 0).all() for count in seen.values())
    changes = {sample: (reference["told"][sample] - reference["free"][sample]).abs().max() for sample in seen}
    assert {sample for sample, change in changes.items() if change > 1e-3} == seen.keys() - {ALIKE}


@pytest.mark.parametrize("case", NAMES)
def test_replay_differences_are_counted_in_a_free_pass(case: str, results: Any, reference: Any) -> None:
    metrics = {name: m.value for name, m in merge_metrics([rank["metrics"] for rank in results[case]]).items()}
    differs, gaps = [], []
    for sample, ids in imposed_experts().items():
        own = reference["recorded"][sample].sort(-1).values.numpy()
        differs.append((np.sort(own if sample == ALIKE else ids, -1) != own).any(-1))
        trained = np.flatnonzero(policy_batch.trained(sample))
        gaps.append(np.abs(reference["free"][sample].numpy() - policy_batch.logp_rollout(sample)[trained]))
    differ = np.concatenate(differs, 1)
    assert 0 < differ.mean() < differ.any(0).mean() < 1  # some layers and tokens are equal by chance
    assert metrics["routing/differing_choices"] == pytest.approx(differ.mean(), abs=1e-12)
    assert metrics["routing/differing_tokens"] == pytest.approx(differ.any(0).mean(), abs=1e-12)
    assert metrics["routing/logp_diff_mean_without_replay"] == pytest.approx(np.concatenate(gaps).mean(), abs=1e-5)
    counted = merge_metrics([rank["metrics"] for rank in results[case]])["routing/differing_tokens"]
    assert counted.count == differ.shape[1]


def _unrecorded(rank: int, directory: str) -> None:
    from mcore_rl.megatron.roles.actor import RankBatch

    config = policy_batch.config(directory, {}, SMALL)
    config.actor.moe.router_replay = "policy"
    actor = policy_batch.build_actor(config)
    share = policy_batch.share(SAMPLES, 0, 1)
    actor.accumulate_gradients(RankBatch([share, share], policy_batch.chunks(), replays=True), 1)


def test_replay_without_recorded_experts_raises(directory: str) -> None:
    with pytest.raises(RankFailedError, match="have no recorded routing"):
        launch(_unrecorded, 1, directory)
