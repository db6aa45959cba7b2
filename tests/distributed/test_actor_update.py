"""Whole updates: a forward pass, then two optimizer steps, compared with AdamW on transformers' model in float64; and
updates that must be rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import NonFiniteError
from mcore_rl.types import Metric
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import case_parameters
from tests.distributed.launch import launch
from tests.distributed.two_steps import OVERLAPPED
from tests.distributed.two_updates import join, make_actor, make_config, reference, train
from tests.selection import usual_cases
from tests.tiny_models import write_tiny_model

REPLICATED = {"distributed_optimizer": False}
GRADIENTS = {"overlap_grad_reduce": True}
EVERY_CASE: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {"moe": ("qwen3_moe", {})},
    2: {
        "dense dp2": ("qwen3", {}),
        "dense fsdp2": ("qwen3", {"strategy": "fsdp2"}),
        "v3 fsdp2": ("deepseek_v3", {"strategy": "fsdp2"}),
        "dense tp2": ("qwen3", {"tp": 2}),
        "dense pp2": ("qwen3", {"pp": 2}),
        "moe ep2": ("qwen3_moe", {"ep": 2}),
        "v3 tp2": ("deepseek_v3", {"tp": 2}),
        "moe cp2": ("qwen3_moe", {"cp": 2}),
        "dense dp2 replicated, overlapped": ("qwen3", {}, REPLICATED | GRADIENTS),
        "moe ep2 replicated": ("qwen3_moe", {"ep": 2}, REPLICATED),
        "moe ep2 overlapped": ("qwen3_moe", {"ep": 2}, OVERLAPPED),
    },
    4: {
        "dense dp2 pp2 vpp2 overlapped gradients": ("qwen3", {"pp": 2, "vpp": 2}, GRADIENTS),
        "dense dp2 pp2 vpp2 overlapped": ("qwen3", {"pp": 2, "vpp": 2}, OVERLAPPED),
    },
}
USUAL = {
    "moe",
    "v3 fsdp2",
    "dense tp2",
    "moe ep2 replicated",
    "moe ep2 overlapped",
    "moe cp2",
    "dense dp2 pp2 vpp2 overlapped",
}
"""Cases that are always tested: each axis, and each special part of a model, once."""
CASES = usual_cases(EVERY_CASE, USUAL)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: str(write_tiny_model(root / kind, kind)) for kind in ("qwen3", "qwen3_moe", "deepseek_v3")}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, tuple[dict[str, torch.Tensor], list[dict[str, Metric]], Any]]:
    """Results of each case, as returned by `join`."""
    joined = {}
    for size, cases in CASES.items():
        ranks = launch(train, size, directories, cases)
        joined |= {name: join(ranks, name) for name in cases}
    return joined


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, tuple[Any, ...]]:
    return {kind: reference(directory) for kind, directory in directories.items()}


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_actor_updates_change_weights_like_adamw(size: int, case: str, results: Any, references: Any) -> None:
    expected = references[CASES[size][case][0]][0]
    weights = results[case][0]
    assert weights.keys() == expected.keys()
    errors = {name: float((weights[name] - tensor).abs().max()) for name, tensor in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    # Weights are of size 1 in float32 (6e-8 each rounding) and move by about 1e-3; a wrong step is off by 1e-4.
    assert errors[worst] <= 2e-6, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_actor_metrics_over_ranks_count_every_token_once(size: int, case: str, results: Any, references: Any) -> None:
    expected = references[CASES[size][case][0]][1]
    reported = results[case][1]
    for ours, theirs in zip(reported, expected, strict=True):
        assert {name: ours[name].value for name in theirs} == pytest.approx(theirs, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_actor_pass_after_a_step_uses_updated_weights(size: int, case: str, results: Any, references: Any) -> None:
    """This also holds if the step left the gathering of parameters to this pass."""
    expected, found = references[CASES[size][case][0]][2], results[case][2]
    assert found.keys() == expected.keys()
    # The step moves them by 1e-2.
    error = max(float((torch.from_numpy(found[sample]) - logp).abs().max()) for sample, logp in expected.items())
    assert error <= 5e-5


def test_actor_second_update_has_ratios_other_than_one(references: Any) -> None:
    """Check the test data: otherwise stored and recomputed log-probabilities could be confused without notice."""
    assert abs(references["qwen3"][1][2]["actor/ppo_kl"]) > 1e-4


def test_actor_update_if_not_finite_raises_on_all_ranks_without_changes(directories: dict[str, str]) -> None:
    for rank in launch(_fail_and_recover, 2, directories):
        loss_message, gradient_message, logp_message = rank["messages"]
        assert "sample 7 (rollout call 1, row 2)" in loss_message
        assert loss_message.startswith("rank ")
        assert "gradient of" in gradient_message
        assert "linear_proj" in gradient_message
        assert f"of sample {rank['culprit']} (" in logp_message
        assert rank["unchanged"]
        assert rank["recovered"]


def _fail_and_recover(rank: int, directories: dict[str, str]) -> dict[str, Any]:
    actor, shares = make_actor(directories["qwen3_moe"], {"ep": 2})
    chunks = policy_batch.chunks()
    batch, _ = actor.recompute_logp(shares, chunks)
    actor.update(batch, 0)
    before = _state(actor)
    messages = []

    poisoned = shares[1].advantages.copy()
    poisoned[shares[1].samples == 7] = np.nan  # on one of the two ranks
    messages.append(
        _refused(lambda: actor.update(replace(batch, shares=[shares[0], replace(shares[1], advantages=poisoned)]), 1))
    )

    projection = actor.chunks[0].decoder.layers[1].self_attention.linear_proj.weight
    hook = projection.register_hook(lambda gradient: gradient * (np.inf if rank == 1 else 1))
    messages.append(_refused(lambda: actor.update(batch, 1)))
    hook.remove()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, _state(actor), strict=True))

    culprit, token = _token_of_one_sample()
    embedding = actor.chunks[0].embedding.word_embeddings.weight.data
    kept = embedding[token].clone()
    embedding[token] = np.inf
    first = 1 if culprit in policy_batch.UPDATES[0] else 0  # its samples are not recomputed
    messages.append(_refused(lambda: actor.recompute_logp([shares[first], shares[1 - first]], chunks)))
    embedding[token] = kept

    batch, _ = actor.recompute_logp(shares, chunks)
    actor.update(batch, 1)
    moved = not torch.equal(before[0], _state(actor)[0])
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in _state(actor))
    return {"messages": messages, "unchanged": unchanged, "culprit": culprit, "recovered": moved and finite}


def _refused(call: Any) -> str:
    with pytest.raises(NonFiniteError) as caught:
        call()
    return str(caught.value)


def _state(actor: Any) -> list[torch.Tensor]:
    """Weights, Adam's moments and schedule."""
    moments = [
        value.clone()
        for part in actor.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
    ]
    return [
        *(tensor.clone() for tensor in actor.tensors().values()),
        *moments,
        torch.tensor([actor.scheduler.num_steps, actor.optimizer.param_groups[0]["lr"]]),
    ]


def _token_of_one_sample() -> tuple[int, int]:
    """Find a sample and a token, before its last position, that only this sample contains."""
    samples = [sample for update in policy_batch.UPDATES for sample in update]
    for sample in samples:
        others = np.concatenate([policy_batch.sequence(other) for other in samples if other != sample])
        for token in policy_batch.sequence(sample)[: policy_batch.PROMPTS[sample]]:
            if token not in others:
                return sample, int(token)
    raise AssertionError("no such token")


def test_actor_with_sft_trains_cross_entropy_at_temperature_one(directories: dict[str, str]) -> None:
    """No forward pass precedes the update, and rollout.temperature is ignored."""
    model = policy_batch.reference_model(directories["qwen3"])
    samples = policy_batch.UPDATES[0]
    with torch.no_grad():
        logp = torch.cat([policy_batch.reference_logp(model, sample, temperature=1.0)[0] for sample in samples])
    [(loss, bfloat16_loss, bfloat16_moved)] = launch(_supervise, 1, directories)
    assert loss == pytest.approx(-float(logp.mean()), rel=1e-5)
    # bfloat16 weights and activations: 3 significant digits.
    assert bfloat16_loss == pytest.approx(loss, rel=0.05)
    assert bfloat16_moved


def _supervise(rank: int, directories: dict[str, str]) -> tuple[float, float, bool]:
    supervised = {"name": "sft", "clip_low": None, "clip_high": None, "dual_clip": None}
    losses, moved = [], False
    for dtype in ("float32", "bfloat16"):
        actor, shares = _supervised_actor(rank, directories["qwen3"], supervised, dtype)
        before = {name: tensor.clone() for name, tensor in actor.tensors().items()}
        batch, _ = actor.recompute_logp(shares[:1], policy_batch.chunks())
        metrics = actor.update(batch, 0)
        losses.append(metrics["actor/loss"].value)
        moved = any(not torch.equal(before[name], tensor) for name, tensor in actor.tensors().items())
        assert all(parameter.main_grad.dtype == torch.float32 for parameter in actor.chunks[0].parameters())
    return losses[0], losses[1], moved


def _supervised_actor(rank: int, directory: str, loss: dict[str, Any], dtype: str) -> tuple[Any, list[Any]]:
    from mcore_rl.config.algorithm import PolicyLossConfig

    algorithm = {"policy_loss": PolicyLossConfig(**loss), "entropy_coefficient": 0.0}
    return make_actor(directory, {}, algorithm=algorithm, model={"dtype": dtype})


def test_schedule_has_no_update_with_rate_zero(directories: dict[str, str], tmp_path: Path) -> None:
    """Compare warm-up and cosine decay to min_lr, over the updates of the run, with their closed form."""
    [rates] = launch(_rates, 1, directories)
    lr, min_lr, warmup, updates = 1.0, 0.1, 2, 6
    expected = [lr * k / (warmup + 1) for k in (1, 2)]
    expected += [
        min_lr + (lr - min_lr) * 0.5 * (1 + np.cos(np.pi * k / (updates - warmup))) for k in range(updates - warmup)
    ]
    assert rates == pytest.approx(expected)
    assert min(rates) > 0


def _rates(rank: int, directories: dict[str, str]) -> list[float]:
    optimizer = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 2, "schedule": "cosine"}
    trainer = {"steps": 3, "prompts_per_step": 8, "prompts_per_update": 4, "update_epochs": 1}
    config = make_config(directories["qwen3"], {})
    for name, value in optimizer.items():
        setattr(config.actor.optimizer, name, value)
    actor, _ = make_actor(directories["qwen3"], {}, actor=vars(config.actor), trainer=trainer)
    rates = []
    for _ in range(6):
        rates.append(float(actor.optimizer.param_groups[0]["lr"]))
        actor.scheduler.step(1)
    return rates


@pytest.mark.parametrize(
    ("kind", "sizes"), [("qwen3_moe", {"ep": 2}), ("deepseek_v3", {"tp": 2}), ("qwen3_moe", {"cp": 2})]
)
def test_actor_after_resume_repeats_the_step_bitwise(
    kind: str, sizes: dict[str, int], directories: dict[str, str], tmp_path: Path
) -> None:
    """megatron-core 0.16.1 loads one step count shared by all parameters, which would then advance once per
    parameter."""
    assert all(launch(_resume, 2, directories[kind], sizes, str(tmp_path)))


def _resume(rank: int, directory: str, sizes: dict[str, int], checkpoint: str) -> bool:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    chunks, ends = policy_batch.chunks(), []
    for resumed in (False, True):
        actor, shares = make_actor(directory, sizes)
        if resumed:
            load_checkpoint(checkpoint, actor)
        else:
            actor.update(actor.recompute_logp(shares, chunks)[0], 0)
            save_checkpoint(checkpoint, actor)
        ends.append((actor.update(actor.recompute_logp(shares, chunks)[0], 1), _state(actor)))
    (metrics, state), (metrics_resumed, state_resumed) = ends
    return metrics == metrics_resumed and all(torch.equal(a, b) for a, b in zip(state, state_resumed, strict=True))


def test_actor_first_update_stores_old_logp_for_later_epochs(directories: dict[str, str]) -> None:
    remembered, recomputed = launch(_old_policy, 1, directories["qwen3_moe"])[0]
    assert remembered.keys() == recomputed.keys()
    for sample, logp in recomputed.items():
        # Same weights, other micro-batches: float32 sums in a different order.
        assert np.allclose(remembered[sample], logp, rtol=0, atol=1e-5), sample


def _old_policy(rank: int, directory: str) -> list[dict[int, np.ndarray]]:
    actor, shares = make_actor(directory, {})
    chunks = policy_batch.chunks()
    later, _ = actor.recompute_logp([shares[1], shares[0]], chunks)
    recomputed = {sample: later.old_logp[sample].numpy().copy() for sample in policy_batch.UPDATES[0]}
    batch, _ = actor.recompute_logp([shares[0], shares[0]], chunks)
    assert not batch.old_logp
    actor.update(batch, 0)
    remembered = {sample: logp.numpy().copy() for sample, logp in batch.old_logp.items()}
    actor.update(batch, 1)  # the second epoch: the policy has moved, the old one has not
    assert all(np.array_equal(batch.old_logp[sample].numpy(), logp) for sample, logp in remembered.items())
    return [remembered, recomputed]
