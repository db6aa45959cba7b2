"""Self-distillation: a moving average of the policy's weights equals a float64 loop, in every layout and over a
checkpoint, and a teacher after hints gives the loss and gradients of plain torch on transformers' model in float64.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.models import TeacherConfig, TeacherSourceConfig
from mcore_rl.data.trajectories import hint_arrays
from mcore_rl.types import TrajectoryBuffers, merge_metrics
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH, SMALL, case_parameters, check_gradients, launch_cases
from tests.distributed.launch import launch
from tests.distributed.teacher_oracle import all_logp, ppo_loss, reverse_kl
from tests.tiny_models import checkpoint_tensors, write_tiny_model

# Float32 against float64, as in test_teacher.
TOLERANCE = 2e-5
HINTS = [8, 9, 5, 12, 0, 10, 4, 7, 6]
"""Tokens of the prompt with the hint; no length equals the prompt's, and sample 4 has no hint."""
TERMS: dict[str, dict[str, Any]] = {
    "whole": {"in_advantage": 0.7, "in_loss": 0.4},
    "top": {"in_advantage": 0.0, "in_loss": 0.4, "top_k": 5},
}
Case = tuple[str, dict[str, Any], int]
CASES: dict[int, dict[str, Case]] = {
    1: {"moe": ("moe", {}, ONE_MICROBATCH)},
    2: {
        "dense dp2": ("dense", {}, SMALL),
        "dense pp2": ("dense", {"pp": 2}, SMALL),
        "dense cp2": ("dense", {"cp": 2}, SMALL),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL),
        "moe tp2": ("moe", {"tp": 2}, SMALL),
    },
}
SAMPLES = policy_batch.UPDATES[0]
RATE = 0.75
SHARED = {"a": 0.5, "b": 0.25, "c": 0.5}
"""Rates of averages by source."""
LIVES: dict[str, Case] = {
    "tp2": ("dense", {"tp": 2}, SMALL),
    "sharded": ("dense", {"shard_parameters": True}, SMALL),
    "fsdp2": ("moe", {"strategy": "fsdp2"}, SMALL),
}
RESUMED: dict[str, dict[str, Any]] = {"tp2": {"pp": 2}, "sharded": {}, "fsdp2": {"ep": 2}}
"""Layout in which the checkpoint of a case is loaded, besides its own."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("averages")
    for name, kind in (("dense", "qwen3"), ("moe", "qwen3_moe")):
        write_tiny_model(root / name, kind)
    return {path.name: str(path) for path in root.iterdir()} | {"checkpoints": str(root / "checkpoints")}


def hint(sample: int) -> np.ndarray:
    return np.random.default_rng(700 + sample).integers(0, policy_batch.VOCABULARY, HINTS[sample]).astype(np.int32)


def hinted_chunks() -> list[TrajectoryBuffers]:
    made, first = [], 0
    for chunk in policy_batch.chunks():
        count = len(chunk.prompt_tokens)
        tokens, offsets = hint_arrays([hint(sample) for sample in range(first, first + count)])
        made.append(replace(chunk, hint_tokens=tokens, hint_offsets=offsets))
        first += count
    return made


def hinted_update(
    directory: str, terms: dict[str, Any], teacher: str | None = None
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return loss, mean of the KL in the loss, and gradients by HF name. teacher: directory of the teacher; None: it
    has the policy's weights."""
    model = policy_batch.reference_model(directory)
    other = model if teacher is None else policy_batch.reference_model(teacher)
    weights, rewards = policy_batch.loss_weights(SAMPLES).astype(float), policy_batch.advantages().astype(float)
    total, kls = torch.zeros((), dtype=torch.float64), []
    for sample in SAMPLES:
        log_p, (logp, entropy) = all_logp(model, sample), policy_batch.reference_logp(model, sample)
        with torch.no_grad():
            log_q = all_logp(other, sample, hint(sample) if HINTS[sample] else None)
        tokens = policy_batch.sequence(sample)[policy_batch.PROMPTS[sample] :][policy_batch.trained(sample) > 0]
        at_tokens = log_q.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0]
        old = logp.detach() + torch.from_numpy(policy_batch.drift(sample)).double()
        kl = reverse_kl(log_p, log_q, terms)
        loss = ppo_loss(logp, old, rewards[sample] + terms["in_advantage"] * (at_tokens - old)) + terms["in_loss"] * kl
        total = total + weights[sample] * (loss - policy_batch.ENTROPY_COEFFICIENT * entropy).sum()
        kls.append(kl.detach())
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(total.detach()), float(torch.cat(kls).mean()), checkpoint_tensors(model, gradients)


def _actor(directory: str, case: Case, rate: float, dtype: str = "float32", **lora: Any) -> Any:
    config = policy_batch.config(directory, *case[1:])
    config.model.dtype = dtype
    config.actor.optimizer.lr = 4e-3
    config.teacher.moving_average, config.teacher.in_advantage, config.teacher.in_loss = rate, 1.0, 0.1
    for key, value in lora.items():
        setattr(config.actor.lora, key, value)
    return policy_batch.build_actor(config)


def _measure(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _hinted_updates(rank, directories[case[0]], case) for name, case in cases.items()}


def _hinted_updates(rank: int, directory: str, case: Case) -> dict[str, Any]:
    from mcore_rl.megatron.step.distillation import Distillation
    from mcore_rl.megatron.step.objective import Objective

    found: dict[str, Any] = {}
    actor = _actor(directory, case, rate=1.0)
    shares, chunks = policy_batch.shares(actor)[::-1], hinted_chunks()
    for name, terms in TERMS.items():
        section = replace(actor.config.teacher, **terms)
        actor.objective = Objective.from_config(replace(actor.config, teacher=section), actor.group, actor.context)
        actor.teachers[0].section, actor.teachers[0].terms = section, Distillation(section)
        batch, _ = actor.recompute_logp(shares, chunks)
        for sample, logp in batch.old_logp.items():
            logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, rank)])
        batch = actor.teacher_outputs(batch)
        with policy_batch.complete_gradients(actor):
            _, reports = actor.accumulate_gradients(batch, 1)
        found[name] = {
            "loss": sum(report.loss for report in reports) if actor.counts_tokens else 0.0,
            "metrics": merge_metrics([r.metrics for r in reports]) if actor.counts_tokens else {},
            "gradients": policy_batch.gradient_pieces(actor),
        }
    return found


@pytest.fixture(scope="module")
def expected(directories: dict[str, str]) -> dict[tuple[str, str], Any]:
    pairs = [(model, name) for model in ("dense", "moe") for name in TERMS]
    return {(model, name): hinted_update(directories[model], TERMS[name]) for model, name in pairs}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return launch_cases(_measure, CASES, directories)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_hinted_teacher_loss_and_gradients_equal_float64(
    size: int, case: str, term: str, results: Any, expected: Any
) -> None:
    loss, kl, gradients = expected[CASES[size][case][0], term]
    ranks = [rank[term] for rank in results[case]]
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    check_gradients([rank["gradients"] for rank in ranks], gradients, TOLERANCE)
    metrics = merge_metrics([rank["metrics"] for rank in ranks])
    assert metrics["distillation/kl_loss"].value == pytest.approx(kl, rel=1e-4)
    counts = {s: int(policy_batch.trained(s).sum()) for s in SAMPLES}
    hinted = metrics["distillation/hinted_fraction"]
    assert (hinted.total, hinted.count) == (sum(counts.values()) - counts[4], sum(counts.values()))


def _live(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _one_life(name, directories, case) for name, case in cases.items()}


def _one_life(name: str, directories: dict[str, str], case: Case) -> dict[str, Any]:
    """Average over three steps, save, and resume in the same layout and in another one."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    path = f"{directories['checkpoints']} {name}"
    actor = _actor(directories[case[0]], case, RATE, "bfloat16")
    # Not the exported weights: sharded bfloat16 parameters are float32.
    versions, averages = [policy_batch.hf_pieces(actor, actor.tensors())], [_averages(actor)]
    for index in range(3):
        if index == 2:
            save_checkpoint(path, actor)
        _step(actor, index)
        versions.append(policy_batch.hf_pieces(actor, actor.tensors()))
        averages.append(_averages(actor))
    found: dict[str, Any] = {"versions": versions, "averages": averages, "weights": _weights(actor)}
    for layout in (case[1], RESUMED[name]):
        again = _actor(directories[case[0]], (case[0], layout, case[2]), RATE, "bfloat16")
        load_checkpoint(path, again)
        found.setdefault("loaded", []).append((_averages(again), _weights(again)))
        if layout is case[1]:
            _step(again, 2)
            found["continued"] = _averages(again), _weights(again)
    return found


def _step(actor: Any, index: int) -> None:
    """Run a step with one update, with the teacher's terms."""
    shares, chunks = [policy_batch.shares(actor)[index % 2]], policy_batch.chunks()
    batch = actor.teacher_outputs(actor.recompute_logp(shares, chunks)[0])
    actor.update(batch, 0)
    actor.gather_parameters()
    actor.update_averages()


def _averages(actor: Any) -> list[Any]:
    """The averages as this rank's slices of HF tensors."""
    averages = actor.averages[0].averages()
    assert all(tensor.dtype == torch.float32 for tensor in averages.values())
    return policy_batch.hf_pieces(actor, averages)


def _weights(actor: Any) -> list[Any]:
    """The weights with which the teacher computes."""
    from mcore_rl.megatron.model.names import canonical_tensors

    actor.averages[0].memory.load("params")
    return policy_batch.hf_pieces(actor, canonical_tensors(actor.averages[0].chunks))


@pytest.fixture(scope="module")
def lives(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    return launch_cases(_live, {2: LIVES}, directories)


@pytest.mark.parametrize("name", LIVES)
def test_moving_average_equals_float64_loop(name: str, lives: dict[str, list[dict[str, Any]]]) -> None:
    ranks = lives[name]
    versions = [policy_batch.assemble([rank["versions"][step] for rank in ranks]) for step in range(4)]
    wanted = versions[0]
    for step in range(4):
        if step:
            wanted = {key: RATE * value + (1 - RATE) * versions[step][key] for key, value in wanted.items()}
        found = policy_batch.assemble([rank["averages"][step] for rank in ranks])
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[key], value, rtol=1e-6, atol=1e-9) for key, value in wanted.items())
    # Each step changes the weights by more than the tolerance.
    assert max(float((versions[3][key] - value).abs().max()) for key, value in versions[2].items()) > 1e-3
    weights = policy_batch.assemble([rank["weights"] for rank in ranks])
    assert all(torch.equal(weights[key], value.float().bfloat16().double()) for key, value in found.items())


@pytest.mark.parametrize("name", LIVES)
def test_moving_average_resumes_bit_equal_in_any_layout(name: str, lives: dict[str, list[dict[str, Any]]]) -> None:
    ranks = lives[name]
    saved = policy_batch.assemble([rank["averages"][2] for rank in ranks])
    for layout in range(2):
        averages, weights = (policy_batch.assemble([rank["loaded"][layout][i] for rank in ranks]) for i in range(2))
        assert averages.keys() == saved.keys()
        assert all(torch.equal(averages[key], value) for key, value in saved.items())
        assert all(torch.equal(weights[key], value.float().bfloat16().double()) for key, value in saved.items())
    last = policy_batch.assemble([rank["averages"][3] for rank in ranks])
    continued = policy_batch.assemble([rank["continued"][0] for rank in ranks])
    assert all(torch.equal(continued[key], value) for key, value in last.items())


def _others(rank: int, directories: dict[str, str], size: int) -> dict[str, Any]:
    """Averages with rate 0, of merged adapters, and checkpoints with and without an average."""
    from mcore_rl.errors import CheckpointError
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from mcore_rl.megatron.model.output import output_weight
    from tests.distributed.saving import save_checkpoint

    case: Case = ("dense", {}, ONE_MICROBATCH)
    actor = _actor(directories["dense"], case, rate=0.0)
    share, chunks = policy_batch.shares(actor)[0], policy_batch.chunks()

    def gap() -> float:
        own = actor.infer(actor.microbatches(share, chunks), actor.objective.outputs.logp_of)
        outputs = actor.averages[0].outputs(share, chunks)
        assert torch.equal(outputs.weights[0], output_weight(actor.chunks[-1]))
        theirs = [torch.cat([outputs.logp[s] for s in batch.samples]) for batch, _ in own]
        return max(float((a - b).abs().max()) for (_, a), b in zip(own, theirs, strict=True))

    found: dict[str, Any] = {"gaps": [gap()]}
    _step(actor, 0)
    found["gaps"].append(gap())
    path = f"{directories['checkpoints']} {rank}"
    save_checkpoint(path, actor)
    found["saved"] = path, policy_batch.hf_pieces(actor, actor.tensors())
    config = policy_batch.config(directories["dense"], *case[1:])
    try:
        load_checkpoint(path, policy_batch.build_actor(config))
    except CheckpointError as error:
        found["refusal"] = str(error)
    adapted = _actor(directories["dense"], case, RATE, rank=4, alpha=8)
    before = {name: tensor.double() for name, tensor in adapted.tensors().items()}
    _step(adapted, 0)
    after = {name: tensor.double() for name, tensor in adapted.tensors().items()}
    averages = adapted.averages[0].averages()
    found["adapted"] = max(
        float((averages[name] - RATE * before[name] - (1 - RATE) * value).abs().max()) for name, value in after.items()
    )
    config.teacher = TeacherConfig(
        in_advantage=1.0, by_source=[TeacherSourceConfig(name, moving_average=rate) for name, rate in SHARED.items()]
    )
    teachers = policy_batch.build_actor(config)
    found["numbers"] = [teachers.teachers.index(each) for each in teachers.teachers], list(teachers.averages)
    found["changed"] = max(float((after[name] - before[name]).abs().max()) for name in after)
    return found


@pytest.fixture(scope="module")
def others(directories: dict[str, str]) -> dict[str, Any]:
    return launch(_others, 1, directories, 1)[0]


def test_moving_average_of_rate_0_is_the_current_policy(others: dict[str, Any]) -> None:
    # Two passes with the same weights.
    assert max(others["gaps"]) <= 5e-6


def test_moving_average_of_adapters_is_of_merged_weights(others: dict[str, Any]) -> None:
    assert others["adapted"] <= 1e-6
    assert others["changed"] > 1e-3


def test_sources_with_the_same_rate_share_an_average(others: dict[str, Any]) -> None:
    assert others["numbers"] == ([0, 1, 0], [0, 1])


def test_checkpoint_with_an_average_needs_the_same_teacher(others: dict[str, Any]) -> None:
    assert "contains 1 moving averages of the policy's weights, and this run has 0" in others["refusal"]


def test_checkpoint_with_an_average_converts_to_the_policy(others: dict[str, Any]) -> None:
    from model_converters.dcp.convert import open_saved

    path, pieces = others["saved"]
    converted, policy = open_saved(Path(path)), policy_batch.assemble([pieces])
    assert converted.shapes.keys() == policy.keys()
    assert all(torch.equal(converted.read(name).double(), tensor) for name, tensor in policy.items())
