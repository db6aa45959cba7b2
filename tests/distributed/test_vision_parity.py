"""Models with a vision tower compared with transformers: log-probabilities and the gradient of every parameter, of the
decoder and of the tower, from the actor's own passes over trajectories with images.

The reference is transformers' model on each sequence alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.errors import McoreRLError
from mcore_rl.weights.frozen import TrainedWeights
from tests.distributed import lora, policy_batch, vision_batch
from tests.distributed.gradient_oracle import TOLERANCE, case_parameters, check_gradients, launch_cases
from tests.distributed.syncing import sync_plan
from tests.selection import EVERY_TEST
from tests.tiny_models import write_tiny_model

KINDS = ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
ADAPTED = "qwen3_vl with adapters"
SMALL = 64
"""Tokens of a micro-batch: the batch then has several, of which some have images in common."""
CASES: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {kind: (kind, {}, "none") for kind in KINDS} | {"adapters recomputed": (ADAPTED, {}, "full")},
    2: {
        "tp2 recomputed": ("qwen3_vl", {"tp": 2}, "full"),
        "tp2 without sp": ("qwen3_vl", {"tp": 2, "sequence_parallel": False}, "none"),
        "pp2": ("qwen3_vl", {"pp": 2}, "none"),
        "cp2": ("qwen3_vl", {"cp": 2}, "none"),
        "nets tp2": ("qwen3_5", {"tp": 2}, "full"),
        "blocks tp2": ("qwen2_5_vl", {"tp": 2}, "none"),
        "adapters tp2": (ADAPTED, {"tp": 2}, "none"),
        "moe tp2 ep2": ("qwen3_vl_moe", {"tp": 2, "ep": 2}, "none"),
    },
}
if EVERY_TEST:
    CASES[2] |= {
        "dp2": ("qwen3_vl", {}, "none"),
        "tp2 selective": ("qwen3_vl", {"tp": 2}, "selective"),
        "blocks pp2": ("qwen2_5_vl", {"pp": 2}, "none"),
        "blocks cp2": ("qwen2_5_vl", {"cp": 2}, "full"),
        "moe ep2": ("qwen3_vl_moe", {"ep": 2}, "none"),
        "moe pp2": ("qwen3_vl_moe", {"pp": 2}, "none"),
        "nets pp2": ("qwen3_5", {"pp": 2}, "none"),
        "nets moe tp2 ep2": ("qwen3_5_moe", {"tp": 2, "ep": 2}, "none"),
        "moe cp2": ("qwen3_vl_moe", {"cp": 2}, "none"),
    }


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    vision_batch.write_adapter(write_tiny_model(root / "adapted", vision_batch.ADAPTED.kind))
    return {kind: str(write_tiny_model(root / kind, kind)) for kind in KINDS} | {ADAPTED: str(root / "adapted")}


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, Any]:
    return {
        kind: (vision_batch.adapter_gradients if kind == ADAPTED else vision_batch.reference_gradients)(directory)
        for kind, directory in directories.items()
    }


# ---- on the ranks ----


def _run_cases(rank: int, directories: dict[str, str], cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: _run_case(directories[kind], *case) for name, (kind, *case) in cases.items()}


def _run_case(directory: str, parallel: dict[str, Any], recompute: str) -> dict[str, Any]:
    config = vision_batch.config(directory, parallel, SMALL)
    config.actor.recompute = recompute
    actor = policy_batch.build_actor(config)
    share, chunks = vision_batch.share(actor), vision_batch.chunks()
    batches = actor.microbatches(share, chunks)
    outcome: dict[str, Any] = {"logp": _whole_logp(actor, batches)}
    if parallel == {} and recompute == "none":
        plain = [replace(batch, positions=None) for batch in batches]
        outcome["plain positions"] = _whole_logp(actor, plain)
        hooks = [layer._forward_hooks.copy() for layer in actor.chunks[0].decoder.layers]
        for layer in actor.chunks[0].decoder.layers:
            layer._forward_hooks.clear()
        outcome["without deepstack"] = _whole_logp(actor, batches)
        for layer, own in zip(actor.chunks[0].decoder.layers, hooks, strict=True):
            layer._forward_hooks.update(own)
    batch, _ = actor.recompute_logp([share], chunks)
    with policy_batch.complete_gradients(actor):
        actor.accumulate_gradients(batch, 0)
    adapted = config.actor.lora.rank > 0
    outcome["gradients"] = (
        lora.adapter_pieces(actor, gradients=True) if adapted else policy_batch.gradient_pieces(actor)
    )
    return outcome


def _whole_logp(actor: Any, batches: list[Any]) -> dict[int, np.ndarray]:
    """Log-probabilities of whole responses by sample; {} on ranks without them."""
    from mcore_rl.megatron.step.loss.trained_tokens import whole_by_sample

    found = actor.infer(batches, actor.objective.outputs.logp_of)
    return {s: v for batch, logp in found for s, v in whole_by_sample(batch, logp, actor.context).items()}


def _train_frozen(rank: int, directory: str) -> dict[str, Any]:
    """Run an update with a frozen tower."""
    config = vision_batch.config(directory, {}, SMALL)
    config.actor.train_vision = False
    actor = policy_batch.build_actor(config)
    before = {name: tensor.clone() for name, tensor in actor.tensors().items()}
    share, chunks = vision_batch.share(actor), vision_batch.chunks()
    batch, _ = actor.recompute_logp([share], chunks)
    metrics = actor.update(batch, 0)
    plan, refused = sync_plan(actor), ""
    try:
        actor.require_frozen(replace(plan, trained=TrainedWeights(adapters=())))
    except McoreRLError as error:
        refused = str(error)
    return {
        "frozen": plan.frozen_parameters,
        "refused": refused,
        "changed": {name: bool((tensor != before[name]).any()) for name, tensor in actor.tensors().items()},
        "metrics": [*metrics],
    }


def _save_and_restore(rank: int, directory: str, checkpoint: str) -> list[str]:
    """Save a trained tower. Returns the names of tensors that another actor restores differently."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    config = vision_batch.config(directory, {}, SMALL)
    trained, restored = (policy_batch.build_actor(config) for _ in range(2))
    batch, _ = trained.recompute_logp([vision_batch.share(trained)], vision_batch.chunks())
    trained.update(batch, 0)
    save_checkpoint(checkpoint, trained)
    load_checkpoint(checkpoint, restored)
    trained.gather_parameters()
    restored.gather_parameters()
    ours, theirs = trained.tensors(), restored.tensors()
    return [name for name in ours if not ours[name].equal(theirs[name])]


# ---- tests ----


@pytest.fixture(scope="module")
def outcomes(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    return launch_cases(_run_cases, CASES, directories)


@pytest.mark.parametrize(("num_ranks", "case"), case_parameters(CASES))
def test_packed_images_give_logp_of_transformers(
    num_ranks: int, case: str, outcomes: dict[str, Any], references: dict[str, Any]
) -> None:
    expected, _ = references[CASES[num_ranks][case][0]]
    found: dict[int, np.ndarray] = {}
    for outcome in outcomes[case]:
        found |= outcome["logp"]
    assert found.keys() == {*range(len(expected))}
    for sample, logp in found.items():
        np.testing.assert_allclose(logp, expected[sample], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_ranks", "case"), case_parameters(CASES))
def test_gradients_of_decoder_and_tower_equal_transformers(
    num_ranks: int, case: str, outcomes: dict[str, Any], references: dict[str, Any]
) -> None:
    _, expected = references[CASES[num_ranks][case][0]]
    # The chunks of gated delta nets solve triangular systems.
    tolerance = 5e-5 if CASES[num_ranks][case][0].startswith("qwen3_5") else TOLERANCE
    check_gradients([outcome["gradients"] for outcome in outcomes[case]], expected, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_controls_without_positions_or_deepstack_differ(kind: str, outcomes: dict[str, Any]) -> None:
    """The reference depends on what these two leave out, so that the comparisons above would show a mistake."""
    (outcome,) = outcomes[kind]

    def difference(name: str) -> float:
        return max(float(np.abs(outcome[name][s] - logp).max()) for s, logp in outcome["logp"].items())

    assert difference("plain positions") > 0.01
    assert (difference("without deepstack") > 0.01) == kind.startswith("qwen3_vl")


def test_frozen_tower_keeps_its_weights(directories: dict[str, str]) -> None:
    from tests.distributed.launch import launch

    (outcome,) = launch(_train_frozen, 1, directories["qwen3_vl"])
    changed = outcome["changed"]
    assert any(name.startswith("vision.") for name in changed)
    assert not any(value for name, value in changed.items() if name.startswith("vision."))
    assert all(value for name, value in changed.items() if not name.startswith("vision."))
    assert "actor/grad_norm_vision" not in outcome["metrics"]
    assert outcome["frozen"] == {name for name, value in changed.items() if not value}
    assert re.search("weights are trained, but engines .* once: decoder.final_layernorm.weight, ", outcome["refused"])


def test_checkpoint_contains_the_trained_tower(directories: dict[str, str], tmp_path: Any) -> None:
    from tests.distributed.launch import launch

    differing = launch(_save_and_restore, 1, directories["qwen3_vl"], str(tmp_path / "checkpoint"))
    assert differing == [[]]
