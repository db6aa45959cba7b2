"""The teacher's terms in every layout: probabilities, loss, metrics and gradients equal plain torch on transformers'
models in float64. The teachers have another family, width and depth than the policy.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from mcore_rl.config.models import TeacherSourceConfig
from mcore_rl.errors import NonFiniteError
from mcore_rl.types import ScoreColumn, TokenScores, merge_metrics
from model_converters.dcp.convert import to_mcore
from model_converters.mapping.layout import TrainLayout
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH, SMALL, case_parameters, check_gradients, launch_cases
from tests.distributed.teacher_oracle import all_logp, distance, outcomes, ppo_loss, reverse_kl
from tests.selection import usual_cases
from tests.tiny_models import checkpoint_tensors, write_tiny_model

# Float32 against float64, as in test_reference; a wrong sign, weight or token differs by 1e-2.
TOLERANCE = 2e-5
K = 5
TERMS: dict[str, dict[str, Any]] = {
    "advantage": {"in_advantage": 0.7},
    "alone": {"in_advantage": 0.7, "alone": True},
    "whole": {"in_advantage": 0.0, "in_loss": 0.4},
    "bucket": {"in_advantage": 0.0, "in_loss": 0.4, "top_k": K},
    "renormalize": {"in_advantage": 0.0, "in_loss": 0.4, "top_k": K, "rest": "renormalize"},
    "both": {"in_advantage": 0.7, "in_loss": 0.4, "top_k": K},
    "sources": {"in_advantage": 0.7, "in_loss": 0.4},
    "served": {"in_advantage": 0.7, "in_loss": 0.4, "top_k": K},
}
TEACHERS_OF = np.array([1, 0, 0, 0, -1, 0, 1, 0, 0], np.int32)
"""Teacher of each sample in the term "sources": the second one is a Megatron checkpoint of the policy, -1 none."""
Case = tuple[str, dict[str, Any], int]
# FSDP2 is data-parallel too, and "dense tp2" divides the teacher's outputs as "moe tp2" does.
ALWAYS_TESTED = {"moe", "dense tp2", "dense pp2", "dense cp2", "dense fsdp2", "dense sharded", "moe ep2"}
EVERY_CASE: dict[int, dict[str, Case]] = {
    1: {"moe": ("moe", {}, ONE_MICROBATCH)},
    2: {
        "dense dp2": ("dense", {}, SMALL),
        "dense tp2": ("dense", {"tp": 2}, SMALL),
        "dense pp2": ("dense", {"pp": 2}, SMALL),
        "dense cp2": ("dense", {"cp": 2}, SMALL),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL),
        "dense sharded": ("dense", {"shard_parameters": True}, SMALL),
        "moe ep2": ("moe", {"ep": 2}, SMALL),
        "moe tp2": ("moe", {"tp": 2}, SMALL),
    },
}
CASES = usual_cases(EVERY_CASE, ALWAYS_TESTED)
SAMPLES = policy_batch.UPDATES[0]
POLICIES = {"dense": "qwen3", "moe": "qwen3_moe"}
TEACHERS = {"dense": "qwen3_moe", "moe": "qwen3"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("teachers")
    for name, kind in POLICIES.items():
        write_tiny_model(root / name, kind)
        write_tiny_model(root / f"{name} teacher", TEACHERS[name], seed=9, hidden_size=96, num_hidden_layers=6)
        # Saved by the ranks of two stages, and loaded by one or two ranks in every layout.
        to_mcore(root / name, root / f"{name} checkpoint", TrainLayout(2, pp=2))
    return {path.name: str(path) for path in root.iterdir()}


class _Expected:
    """transformers' models in float64, one unpacked sequence at a time."""

    def __init__(self, directory: str) -> None:
        self.policy = policy_batch.reference_model(directory)
        teacher = policy_batch.reference_model(f"{directory} teacher")
        with torch.no_grad():
            logp = {s: policy_batch.reference_logp(self.policy, s)[0] for s in SAMPLES}
            self.log_q = [{s: all_logp(model, s) for s in SAMPLES} for model in (teacher, self.policy)]
            self.at_tokens = [{s: policy_batch.reference_logp(teacher, s)[0] for s in SAMPLES}, logp]
        self.old = {s: logp[s] + torch.from_numpy(policy_batch.drift(s)).double() for s in SAMPLES}

    def update(self, name: str, terms: dict[str, Any]) -> tuple[float, float, dict[str, torch.Tensor]]:
        """Return loss, mean of the KL in the loss, and gradients by HF name."""
        weights, rewards = policy_batch.loss_weights(SAMPLES).astype(float), policy_batch.advantages().astype(float)
        total, kls = torch.zeros((), dtype=torch.float64), []
        self.policy.zero_grad()
        for sample in SAMPLES:
            log_p = all_logp(self.policy, sample)
            logp = policy_batch.reference_logp(self.policy, sample)[0]
            entropy = -(log_p.exp() * log_p).sum(1)
            advantage = torch.full_like(logp.detach(), 0.0 if terms.get("alone") else rewards[sample])
            number = int(TEACHERS_OF[sample]) if name == "sources" else 0
            at_tokens, kl = self.at_tokens[number][sample], reverse_kl(log_p, self.log_q[number][sample], terms)
            if name == "served":
                scores = served(sample)
                at_tokens, ids = torch.from_numpy(scores.logp), torch.from_numpy(scores.top_ids).long()
                kl = distance(outcomes(log_p.exp().gather(1, ids)), torch.from_numpy(scores.top_logp))
            if number >= 0:
                advantage = advantage + terms["in_advantage"] * (at_tokens - self.old[sample])
                kls.append(kl.detach())
            loss = ppo_loss(logp, self.old[sample], advantage) + terms.get("in_loss", 0.0) * (kl if number >= 0 else 0)
            total = total + weights[sample] * (loss - policy_batch.ENTROPY_COEFFICIENT * entropy).sum()
        total.backward()
        gradients = {name: parameter.grad for name, parameter in self.policy.named_parameters()}
        return float(total.detach()), float(torch.cat(kls).mean()), checkpoint_tensors(self.policy, gradients)


def served(sample: int) -> TokenScores:
    """Random answer of a server, with the most probable tokens in its own order."""
    count, generator = int(policy_batch.trained(sample).sum()), np.random.default_rng(600 + sample)
    ids = np.stack([generator.permutation(policy_batch.VOCABULARY)[:K] for _ in range(count)])
    parts = np.log(generator.dirichlet(np.ones(K + 1), count))
    return TokenScores.of(generator.normal(-4, 1, count), ids, parts[:, :K])


def _measure(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _measure_one(rank, directories, *case) for name, case in cases.items()}


def _measure_one(rank: int, directories: dict[str, str], model: str, parallel: dict[str, Any], tokens: int) -> Any:
    from mcore_rl.megatron.step.distillation import Distillation
    from mcore_rl.megatron.step.objective import Objective

    config = policy_batch.config(directories[model], parallel, tokens)
    config.teacher.hf_path = directories[f"{model} teacher"]
    config.teacher.by_source = [TeacherSourceConfig("own", checkpoint=directories[f"{model} checkpoint"])]
    actor = policy_batch.build_actor(config)
    # Like a second update, with old log-probabilities.
    shares, chunks = policy_batch.shares(actor)[::-1], policy_batch.chunks()
    found: dict[str, Any] = {}
    teachers = actor.teachers
    column = ScoreColumn.of({sample: served(sample) for sample in range(len(policy_batch.PROMPTS))})
    for name, terms in TERMS.items():
        section = replace(config.teacher, **terms)
        actor.teachers = [] if name == "served" else teachers
        actor.objective = Objective.from_config(replace(config, teacher=section), actor.group, actor.context)
        for teacher in teachers:
            teacher.section, teacher.terms = section, Distillation(section)
        batch, _ = actor.recompute_logp(shares, chunks)
        for sample, logp in batch.old_logp.items():
            logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, rank)])
        chosen = TEACHERS_OF if name == "sources" else None
        batch = actor.teacher_outputs(batch, chosen, [column] if name == "served" else [])
        with policy_batch.complete_gradients(actor):
            _, reports = actor.accumulate_gradients(batch, 1)
        found[name] = {
            "loss": sum(report.loss for report in reports) if actor.counts_tokens else 0.0,
            "metrics": merge_metrics([r.metrics for r in reports]) if actor.counts_tokens else {},
            "gradients": policy_batch.gradient_pieces(actor),
            "logp": {
                s: (policy_batch.held(s, actor.layout, rank), logp.numpy().copy())
                for s, logp in batch.teacher.logp.items()
            },
        }
    found["memory"] = teachers[0].memory.released_bytes
    found["moved"] = _moved_outputs(teachers[0], shares[0], chunks)
    teachers[0].memory.load("params")
    with torch.no_grad():
        for parameter in teachers[0].chunks[0].parameters():
            parameter.fill_(float("nan"))
    try:
        teachers[0].outputs(shares[0], chunks)
    except NonFiniteError as error:
        found["error"] = str(error)
    return found


def _moved_outputs(teacher: Any, share: Any, chunks: Any) -> list[tuple[int, int]]:
    """Count the outputs of each micro-batch, and those that are moved to the host before the next one."""
    infer, counts, moved = teacher.infer, list[tuple[int, int]](), [0]
    to_host = torch.Tensor.cpu

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved[0] += 1
        return to_host(tensor)

    def counting(batches: Any, evaluate: Callable[..., Any]) -> Any:
        def counted(*given: Any) -> Any:
            moved[0] = 0
            with mock.patch.object(torch.Tensor, "cpu", move):
                result = evaluate(*given)
            counts.append((len(result[1]), moved[0]))
            return result

        return infer(batches, counted)

    with mock.patch.object(teacher, "infer", counting):
        teacher.outputs(share, chunks)
    return counts


@pytest.fixture(scope="module")
def expected(directories: dict[str, str]) -> dict[str, dict[str, Any]]:
    wanted = {name: _Expected(directories[name]) for name in POLICIES}
    return {
        name: {"logp": each.at_tokens[0]} | {term: each.update(term, terms) for term, terms in TERMS.items()}
        for name, each in wanted.items()
    }


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return launch_cases(_measure, CASES, directories)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_teacher_logp_in_every_layout_equals_transformers(size: int, case: str, results: Any, expected: Any) -> None:
    wanted = expected[CASES[size][case][0]]["logp"]
    whole = {s: np.full(len(logp), np.nan) for s, logp in wanted.items()}
    for rank in results[case]:
        for sample, (held, logp) in rank["advantage"]["logp"].items():
            if sample in whole:
                whole[sample][held] = logp
    assert max(np.abs(whole[s] - wanted[s].numpy()).max() for s in SAMPLES) <= TOLERANCE


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_teacher_term_loss_and_gradients_equal_float64(
    size: int, case: str, term: str, results: Any, expected: Any
) -> None:
    loss, kl, gradients = expected[CASES[size][case][0]][term]
    ranks = [rank[term] for rank in results[case]]
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    check_gradients([rank["gradients"] for rank in ranks], gradients, TOLERANCE)
    metrics = merge_metrics([rank["metrics"] for rank in ranks])
    assert ("distillation/kl_loss" in metrics) == ("in_loss" in TERMS[term])
    if "in_loss" in TERMS[term]:
        assert metrics["distillation/kl_loss"].value == pytest.approx(kl, rel=1e-4)
        counts = {s: int(policy_batch.trained(s).sum()) for s in SAMPLES}
        untaught = sum(counts[s] for s in SAMPLES if term == "sources" and TEACHERS_OF[s] < 0)
        assert metrics["distillation/kl_loss"].count == sum(counts.values()) - untaught
        found = metrics["distillation/untaught_fraction"]
        assert (found.total, found.count) == (untaught, sum(counts.values()))


def test_teacher_terms_have_different_gradients(expected: dict[str, dict[str, Any]]) -> None:
    """Check the test data: terms that the ranks mix up must not pass."""
    name = "model.embed_tokens.weight"
    seen = [expected["dense"][term][2][name] for term in TERMS]
    pairs = [(a, b) for i, a in enumerate(seen) for b in seen[i + 1 :]]
    assert min(float((a - b).abs().max() / a.abs().max()) for a, b in pairs) > 1e-2


def test_teacher_is_offloaded_between_passes(results: dict[str, list[dict[str, Any]]]) -> None:
    assert all(rank["memory"] > 0 for ranks in results.values() for rank in ranks)


def test_teacher_outputs_leave_the_device_after_each_microbatch(results: dict[str, list[dict[str, Any]]]) -> None:
    counts = [count for ranks in results.values() for rank in ranks for count in rank["moved"]]
    assert counts
    assert all(moved == outputs > 0 for outputs, moved in counts)


def test_teacher_outputs_that_are_not_finite_name_samples(results: dict[str, list[dict[str, Any]]]) -> None:
    for ranks in results.values():
        for rank in ranks:
            assert re.search(r"output of the teacher of samples? \d+", rank["error"])
