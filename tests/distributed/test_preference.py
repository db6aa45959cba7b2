"""Sums of log-probabilities, and the gradient of DPO in every parameter, layout and division into micro-batches, equal
DPO's own loss on transformers' models in float64.
One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.preference import score_pairs
from mcore_rl.config.objectives import PreferenceConfig
from mcore_rl.text_objectives import mean_over_pairs
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH, SMALL, case_parameters, check_gradients, launch_cases
from tests.tiny_models import checkpoint_tensors, write_tiny_model

# As in test_reference: float32 against float64.
LOGP_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 2e-5
PAIRS = [(0, 3), (2, 1), (4, 5), (6, 7)]
"""Chosen and rejected samples; with SMALL micro-batches and several ranks, most pairs are in different ones."""
SAMPLES = [sample for pair in PAIRS for sample in pair]
SIGMOID = PreferenceConfig(beta=0.4)
NORMALIZED = PreferenceConfig(beta=2.0, length_normalized=True, label_smoothing=0.1)
FREE = PreferenceConfig(beta=1.5, length_normalized=True, reference_free=True, target_margin=0.5)
Case = tuple[str, dict[str, Any], int, PreferenceConfig]
CASES: dict[int, dict[str, Case]] = {
    1: {"moe": ("moe", {}, ONE_MICROBATCH, SIGMOID), "dense split": ("dense", {}, SMALL, NORMALIZED)},
    2: {
        "dense dp2": ("dense", {}, SMALL, SIGMOID),
        "dense tp2": ("dense", {"tp": 2}, SMALL, NORMALIZED),
        "dense pp2": ("dense", {"pp": 2}, SMALL, SIGMOID),
        "dense cp2": ("dense", {"cp": 2}, SMALL, NORMALIZED),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL, SIGMOID),
        "moe ep2": ("moe", {"ep": 2}, SMALL, FREE),
        "moe cp2 ep2": ("moe", {"cp": 2, "ep": 2}, SMALL, SIGMOID),
    },
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("pairs")
    for name, kind in (("dense", "qwen3"), ("moe", "qwen3_moe")):
        write_tiny_model(root / name, kind)
        write_tiny_model(root / f"{name} reference", kind, seed=8)
    return {path.name: str(path) for path in root.iterdir()}


class _Expected:
    """DPO by autograd through transformers' model in float64, one unpacked sequence at a time."""

    def __init__(self, directory: str, section: PreferenceConfig) -> None:
        policy = policy_batch.reference_model(directory)
        reference = policy_batch.reference_model(f"{directory} reference")
        logp = {s: policy_batch.reference_logp(policy, s, 1.0)[0] for s in SAMPLES}
        with torch.no_grad():
            ref = {s: policy_batch.reference_logp(reference, s, 1.0)[0] for s in SAMPLES}
        self.policy = {s: float(values.detach().sum()) for s, values in logp.items()}
        self.reference = {s: float(values.sum()) for s, values in ref.items()}
        losses = []
        for pair in PAIRS:
            chosen, rejected = (
                section.beta
                * (logp[s] if section.reference_free else logp[s] - ref[s]).sum()
                / (len(logp[s]) if section.length_normalized else 1)
                for s in pair
            )
            h, e = chosen - rejected - section.target_margin, section.label_smoothing
            losses.append(-(1 - e) * torch.log(torch.sigmoid(h)) - e * torch.log(torch.sigmoid(-h)))
        loss = torch.stack(losses).mean()
        loss.backward()
        self.loss = float(loss.detach())
        self.gradients = checkpoint_tensors(policy, {name: p.grad for name, p in policy.named_parameters()})


@pytest.fixture(scope="module")
def expected(directories: dict[str, str]) -> dict[str, _Expected]:
    cases = {name: case for of_size in CASES.values() for name, case in of_size.items()}
    return {name: _Expected(directories[model], section) for name, (model, _, _, section) in cases.items()}


def _measure(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _measure_one(rank, directories, *case) for name, case in cases.items()}


def _measure_one(
    rank: int, directories: dict[str, str], model: str, parallel: dict[str, Any], tokens: int, section: PreferenceConfig
) -> Any:
    import torch.distributed as dist

    actor = policy_batch.build_actor(_config(directories, model, parallel, tokens, section))
    place = actor.layout.coordinates(rank)
    share = policy_batch.share(SAMPLES, place.dp, actor.layout.dp)
    chunks = policy_batch.chunks()
    sums = actor.sequence_logp([share], chunks)
    # The driver joins the sums of one rank per data-parallel coordinate.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sums)
    policy = {sample: value for each in gathered for sample, value in each.policy.items()}
    reference = {sample: value for each in gathered for sample, value in (each.reference or {}).items()}
    scored = score_pairs(_table(policy), _table(reference) if reference else None, _counts(), section)
    advantages, weights = np.zeros((2, len(policy_batch.PROMPTS)), np.float32)
    advantages[SAMPLES] = scored.weights.reshape(-1).numpy()
    weights[SAMPLES] = mean_over_pairs(_counts().reshape(-1).numpy())
    share = replace(share, advantages=advantages[share.samples], loss_weights=weights[share.samples])
    batch, _ = actor.recompute_logp([share], chunks)
    with policy_batch.complete_gradients(actor):
        actor.accumulate_gradients(batch, 0)
    return {
        "own": sums,
        "policy": policy,
        "reference": reference,
        "loss": float(scored.loss.mean()),
        "gradients": policy_batch.gradient_pieces(actor),
    }


def _config(
    directories: dict[str, str], model: str, parallel: dict[str, Any], tokens: int, section: PreferenceConfig
) -> Any:
    config = policy_batch.config(directories[model], parallel, tokens)
    # The temperature of the helper must have no effect: pairs are compared at temperature 1.
    config.algorithm.entropy_coefficient = 0.0
    config.algorithm.policy_loss = type(config.algorithm.policy_loss)(name="dpo")
    config.trainer.objective, config.preference = "dpo", section
    config.reference.hf_path = None if section.reference_free else directories[f"{model} reference"]
    return config


def _table(by_sample: dict[int, float]) -> torch.Tensor:
    return torch.tensor([[by_sample[s] for s in pair] for pair in PAIRS], dtype=torch.float64)


def _counts() -> torch.Tensor:
    return torch.tensor([[int(policy_batch.trained(s).sum()) for s in pair] for pair in PAIRS])


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return launch_cases(_measure, CASES, directories)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_sequence_sums_in_every_layout_equal_transformers(size: int, case: str, results: Any, expected: Any) -> None:
    wanted, free = expected[case], CASES[size][case][3].reference_free
    longest = max(policy_batch.RESPONSES)
    for rank in results[case]:
        assert rank["policy"] == pytest.approx(wanted.policy, abs=longest * LOGP_TOLERANCE)
        assert rank["reference"] == ({} if free else pytest.approx(wanted.reference, abs=longest * LOGP_TOLERANCE))
        assert (rank["own"].reference is None) == free


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_dpo_gradient_in_every_layout_equals_autograd(size: int, case: str, results: Any, expected: Any) -> None:
    for rank in results[case]:
        assert rank["loss"] == pytest.approx(expected[case].loss, rel=2e-5)
    check_gradients([rank["gradients"] for rank in results[case]], expected[case].gradients, GRADIENT_TOLERANCE)


def test_pairs_are_in_different_micro_batches() -> None:
    """Check the test data: a pair longer than a micro-batch cannot share one."""
    lengths = {s: policy_batch.PROMPTS[s] + policy_batch.RESPONSES[s] for s in SAMPLES}
    assert any(sum(lengths[s] for s in pair) > SMALL for pair in PAIRS)
