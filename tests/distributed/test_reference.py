"""The reference: log-probabilities, the KL in the loss and the KL in the reward equal plain torch on transformers'
models in float64, in every layout; refreshing, offloading and checkpoints preserve its weights.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms import estimator
from mcore_rl.types import merge_metrics
from tests.distributed import converting, policy_batch
from tests.distributed.gradient_oracle import (
    ONE_MICROBATCH,
    SMALL,
    case_parameters,
    check_gradients,
    launch_cases,
)
from tests.distributed.launch import launch
from tests.tiny_models import checkpoint_tensors, write_tiny_model

# Float32 against float64. A wrong sign, coefficient or token differs by 1e-2; on some CPUs the gradient of a
# router differs by 1.03e-5.
LOGP_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 2e-5
SAME = 5e-6
"""Tolerance for two passes with the same weights: on some AMD CPUs logits differ in the last digit, by 1e-6."""
IN_LOSS, IN_REWARD = 0.7, 0.3
Case = tuple[str, dict[str, Any], int]
CASES: dict[int, dict[str, Case]] = {
    1: {"moe": ("moe", {}, ONE_MICROBATCH)},
    2: {
        "dense dp2": ("dense", {}, SMALL),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL),
        "dense tp2": ("dense", {"tp": 2}, SMALL),
        "dense pp2": ("dense", {"pp": 2}, SMALL),
        "dense cp2": ("dense", {"cp": 2}, SMALL),
        "moe ep2": ("moe", {"ep": 2}, SMALL),
        "moe fsdp2": ("moe", {"strategy": "fsdp2"}, SMALL),
    },
}
SAMPLES = sorted(s for update in policy_batch.UPDATES for s in update)
SAVED, RESUMED = "dense tp2", "dense pp2"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("references")
    for name, kind in (("dense", "qwen3"), ("moe", "qwen3_moe")):
        write_tiny_model(root / name, kind)
        write_tiny_model(root / f"{name} reference", kind, seed=8)
    return {path.name: str(path) for path in root.iterdir()} | {"checkpoints": str(root / "checkpoints")}


class _Expected:
    """transformers' models in float64, one unpacked sequence at a time."""

    def __init__(self, directory: str) -> None:
        policy = policy_batch.reference_model(directory)
        reference = policy_batch.reference_model(f"{directory} reference")
        with torch.no_grad():
            self.logp = {s: policy_batch.reference_logp(policy, s)[0] for s in SAMPLES}
            self.ref = {s: policy_batch.reference_logp(reference, s)[0] for s in SAMPLES}
        samples = policy_batch.UPDATES[0]
        old = {s: self.logp[s] + torch.from_numpy(policy_batch.drift(s)).double() for s in samples}
        loss, _ = policy_batch.reference_loss(policy, samples, old)
        kls = []
        for sample in samples:
            d = self.ref[sample] - policy_batch.reference_logp(policy, sample)[0]
            kl = torch.exp(d) - 1 - d
            loss = loss + float(policy_batch.loss_weights(samples)[sample]) * IN_LOSS * kl.sum()
            kls.append(kl.detach())
        loss.backward()
        self.loss, self.kl = loss.item(), float(torch.cat(kls).mean())
        gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
        self.gradients = checkpoint_tensors(policy, gradients)


@pytest.fixture(scope="module")
def expected(directories: dict[str, str]) -> dict[str, _Expected]:
    return {name: _Expected(directories[name]) for name in ("dense", "moe")}


def _actor(directory: str, parallel: dict[str, Any], tokens: int, **reference: Any) -> Any:
    config = policy_batch.config(directory, parallel, tokens)
    config.algorithm.kl.in_loss, config.algorithm.kl.in_reward = IN_LOSS, IN_REWARD
    config.actor.optimizer.lr = 4e-3
    for key, value in reference.items():
        setattr(config.reference, key, value)
    return policy_batch.build_actor(config)


def _measure(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _measure_one(rank, directories, *case) for name, case in cases.items()}


def _measure_one(rank: int, directories: dict[str, str], model: str, parallel: dict[str, Any], tokens: int) -> Any:
    actor = _actor(directories[model], parallel, tokens, hf_path=directories[f"{model} reference"])
    shares, chunks = policy_batch.shares(actor), policy_batch.chunks()
    batch = actor.reference_logp(actor.recompute_logp(shares, chunks)[0])
    ref = {s: (policy_batch.held(s, actor.layout, rank), logp.numpy().copy()) for s, logp in batch.ref_logp.items()}
    penalized, metrics = actor.kl_penalties(batch, IN_REWARD)
    found = {"ref": ref, "penalties": penalized.penalties, "reward": metrics}
    actor.estimator = estimator("reinforce_plus_plus")
    _, _, found["returns"] = actor.estimate(penalized, None)
    old_logp = {
        s: logp + torch.from_numpy(policy_batch.drift(s)[policy_batch.held(s, actor.layout, rank)])
        for s, logp in _own_logp(actor, shares[0], chunks).items()
    }
    # Like a second update, with old log-probabilities.
    later = replace(penalized, shares=[shares[1], shares[0]], old_logp=old_logp)
    with policy_batch.complete_gradients(actor):
        _, reports = actor.accumulate_gradients(later, 1)
    counts = actor.counts_tokens
    found["loss"] = sum(report.loss for report in reports) if counts else 0.0
    found["metrics"] = merge_metrics([report.metrics for report in reports]) if counts else {}
    found["gradients"] = policy_batch.gradient_pieces(actor)
    return found


def _own_logp(actor: Any, share: Any, chunks: list[Any]) -> dict[int, torch.Tensor]:
    found = actor.infer(actor.microbatches(share, chunks), actor.objective.outputs.logp_of)
    return {
        s: part
        for batch, logp in found
        for s, part in zip(batch.samples, logp.split(batch.trained_counts), strict=True)
    }


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return launch_cases(_measure, CASES, directories)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_reference_logp_in_every_layout_equals_transformers(size: int, case: str, results: Any, expected: Any) -> None:
    wanted = expected[CASES[size][case][0]].ref
    whole = {s: np.full(len(logp), np.nan) for s, logp in wanted.items()}
    for rank in results[case]:
        for sample, (held, logp) in rank["ref"].items():
            whole[sample][held] = logp
    assert max(np.abs(whole[s] - wanted[s].numpy()).max() for s in SAMPLES) <= LOGP_TOLERANCE


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_reference_penalties_cover_whole_responses(size: int, case: str, results: Any, expected: Any) -> None:
    logp, ref = expected[CASES[size][case][0]].logp, expected[CASES[size][case][0]].ref
    wanted = {s: IN_REWARD * (logp[s] - ref[s]).numpy() for s in SAMPLES}  # k1, for every sample of both updates
    found: dict[int, list[np.ndarray]] = {}
    for rank in results[case]:
        for sample, penalties in rank["penalties"].items():
            found.setdefault(sample, []).append(penalties)
    assert sorted(found) == SAMPLES
    for sample, of_ranks in found.items():
        assert all(np.abs(part - wanted[sample]).max() <= LOGP_TOLERANCE for part in of_ranks)
    mean = merge_metrics([rank["reward"] for rank in results[case]])["reward/kl"]
    assert mean.count == sum(len(part) for part in wanted.values())
    assert mean.value == pytest.approx(np.concatenate(list(wanted.values())).mean() / IN_REWARD, abs=LOGP_TOLERANCE)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_token_returns_subtract_later_penalties(size: int, case: str, results: Any, expected: Any) -> None:
    logp, ref = expected[CASES[size][case][0]].logp, expected[CASES[size][case][0]].ref
    seen = set()
    for rank in results[case]:
        for sample, returns in rank["returns"].items():
            penalties = IN_REWARD * (logp[sample] - ref[sample]).numpy()
            reward = 2 * float(policy_batch.advantages()[sample]) + 1
            wanted = [reward - penalties[t:].sum() for t in range(len(penalties))]
            assert returns == pytest.approx(wanted, abs=LOGP_TOLERANCE)
            seen.add(sample)
    assert sorted(seen) == SAMPLES


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_loss_contains_kl_and_its_gradient(size: int, case: str, results: Any, expected: Any) -> None:
    wanted = expected[CASES[size][case][0]]
    assert sum(rank["loss"] for rank in results[case]) == pytest.approx(wanted.loss, rel=1e-5)
    metrics = merge_metrics([rank["metrics"] for rank in results[case]])
    assert metrics["actor/kl_reference"].value == pytest.approx(wanted.kl, rel=1e-4)
    check_gradients([rank["gradients"] for rank in results[case]], wanted.gradients, GRADIENT_TOLERANCE)


def _live(rank: int, directories: dict[str, str], size: int) -> dict[str, Any]:
    """A reference with the policy's initial weights over updates, refreshes and a checkpoint of another layout."""
    from mcore_rl.errors import OffloadedError
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    case, other = (CASES[size][name] for name in (SAVED, RESUMED))
    actor = _living(directories, case)
    chunks, shares = policy_batch.chunks(), policy_batch.shares(actor)
    found: dict[str, Any] = {}

    def distance() -> float:
        ref_logp = actor.reference_logp(actor.recompute_logp(shares, chunks)[0]).ref_logp
        own = _own_logp(actor, shares[0], chunks)
        return max([float((own[s] - ref_logp[s]).abs().max()) for s in own], default=0.0)

    found["at first"] = distance()
    memory, weights = actor.reference.memory, list(actor.reference.chunks[0].parameters())
    found["released"] = memory.released_bytes, sum(w.untyped_storage().nbytes() for w in _storages(weights))
    memory.load("params")
    found["held"] = memory.released_bytes, sum(w.numel() * w.element_size() for w in weights)
    memory.offload()
    try:
        weights[0].sum()
    except OffloadedError as error:
        found["refusal"] = str(error)
    batch = actor.reference_logp(actor.recompute_logp(shares, chunks)[0])
    for index in range(len(shares)):
        actor.update(batch, index)
    found["after updates"] = distance()
    actor.refresh_reference()
    found["refreshed"] = distance()
    actor.update(actor.reference_logp(actor.recompute_logp(shares, chunks)[0]), 0)
    found["left behind"] = distance()
    path = directories["checkpoints"]
    actor.gather_parameters()
    save_checkpoint(path, actor)
    found["saved"] = _weights(actor)
    actor = _living(directories, other)
    shares = policy_batch.shares(actor)
    load_checkpoint(path, actor)
    found["loaded"] = _weights(actor)
    found["resumed"] = distance()
    actor = _living(directories, case, kept=False)
    found["not kept"] = _refusal(lambda: load_checkpoint(path, actor))
    save_checkpoint(f"{path} without", actor)
    actor = _living(directories, case)
    found["not found"] = _refusal(lambda: load_checkpoint(f"{path} without", actor))
    return found


def _refusal(call: Callable[[], Any]) -> str:
    from mcore_rl.errors import CheckpointError

    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def _living(directories: dict[str, str], case: Case, *, kept: bool = True) -> Any:
    model, parallel, tokens = case
    config = policy_batch.config(directories[model], parallel, tokens)
    config.model.dtype = "bfloat16"
    config.algorithm.kl.in_reward = IN_REWARD
    config.reference.refresh_every_steps = int(kept)
    config.actor.optimizer.lr = 4e-3
    return policy_batch.build_actor(config)


def _storages(weights: list[torch.Tensor]) -> list[Any]:
    with torch._C.DisableTorchFunctionSubclass():
        return [torch.nn.Parameter.detach(w) for w in weights]


def _weights(actor: Any) -> list[Any]:
    """Weights of the reference as this rank's slices of HF tensors."""
    from mcore_rl.megatron.model.names import canonical_tensors

    actor.reference.memory.load("params")
    return policy_batch.hf_pieces(actor, canonical_tensors(actor.reference.chunks))


@pytest.fixture(scope="module")
def lives(directories: dict[str, str]) -> list[dict[str, Any]]:
    return launch(_live, 2, directories, 2)


def test_reference_starts_as_policy_stays_and_is_refreshed(lives: list[dict[str, Any]]) -> None:
    distance = {name: max(rank[name] for rank in lives) for name in ("at first", "after updates", "left behind")}
    assert distance["at first"] <= SAME
    assert max(rank["refreshed"] for rank in lives) <= SAME
    assert distance["after updates"] > 1e-2
    assert distance["left behind"] > 1e-3


def test_reference_is_offloaded_between_passes(lives: list[dict[str, Any]]) -> None:
    for rank in lives:
        assert rank["released"] == (rank["held"][1], 0)
        assert rank["held"][0] == 0
        assert "host memory" in rank["refusal"]


def test_reference_weights_missing_on_one_side_raise(lives: list[dict[str, Any]]) -> None:
    for rank in lives:
        assert "contains the weights of a reference, but this run saves none" in rank["not kept"]
        assert "without does not contain the weights of a reference, but this run saves them" in rank["not found"]


def test_refreshed_reference_resumes_in_another_layout(lives: list[dict[str, Any]], directories: Any) -> None:
    saved, loaded = (policy_batch.assemble([rank[when] for rank in lives]) for when in ("saved", "loaded"))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    resumed, before = (max(rank[when] for rank in lives) for when in ("resumed", "left behind"))
    assert resumed == pytest.approx(before, rel=0.3)
    # The checkpoint still contains the policy.
    target = f"{directories['checkpoints']}.hf"
    assert converting.cli("to-hf", "--ckpt", directories["checkpoints"], "--out", target)[0] == 0
