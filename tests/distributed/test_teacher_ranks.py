"""Teachers on ranks of their own, in another layout than the policy's: scores equal transformers' model in float64, and
the policy that reads them has the loss and gradients of plain torch.

One launch runs all cases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.models import ParallelConfig
from mcore_rl.errors import NonFiniteError
from mcore_rl.types import ScoreColumn, TokenScores, merge_metrics
from model_converters.dcp.convert import to_mcore
from model_converters.mapping.layout import TrainLayout
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import SMALL, check_gradients, launch_cases
from tests.distributed.teacher_oracle import all_logp, outcomes
from tests.distributed.test_self_distillation import HINTS, hint, hinted_chunks, hinted_update
from tests.tiny_models import write_tiny_model

# Float32 against float64, as in test_teacher. All samples are compared here, and the least probable tokens have
# log-probabilities near -25, where neighbouring float32 numbers differ by 2e-6.
TOLERANCE, RELATIVE = 2e-5, 2e-6
K = 5
TERMS: dict[str, Any] = {"in_advantage": 0.7, "in_loss": 0.4, "top_k": K}
HINTED_TOKENS = 32
"""Tokens of a micro-batch of the teacher: prompts with hints are longer than the policy's."""
Case = tuple[str, str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "tp2 for dp2": ("hf_path", "dense", {"tp": 2}, {}),
    "pp2 for cp2": ("checkpoint", "dense", {"pp": 2}, {"cp": 2}),
    "cp2 for tp2": ("hf_path", "dense", {"cp": 2}, {"tp": 2}),
    "ep2 for pp2": ("hf_path", "dense", {"ep": 2}, {"pp": 2}),
    "dp2 for ep2": ("hf_path", "moe", {}, {"ep": 2}),
}
"""Key of the teacher, policy, layout of the teacher, and layout of the policy."""
SAMPLES = range(len(policy_batch.PROMPTS))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("teacher ranks")
    for name, policy, teacher in (("dense", "qwen3", "qwen3_moe"), ("moe", "qwen3_moe", "qwen3")):
        write_tiny_model(root / name, policy)
        write_tiny_model(root / f"{name} hf_path", teacher, seed=9, hidden_size=96, num_hidden_layers=6)
    to_mcore(root / "dense hf_path", root / "dense checkpoint", TrainLayout(2, ep=2))
    return {path.name: str(path) for path in root.iterdir()}


def _measure(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _measure_one(rank, directories, *case) for name, case in cases.items()}


def _measure_one(
    rank: int, directories: dict[str, str], key: str, model: str, own: dict[str, Any], parallel: dict[str, Any]
) -> Any:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.teacher_ranks import MegatronTeacher

    config = policy_batch.config(directories[model], parallel, SMALL)
    teacher = {key: directories[f"{model} {key}"], "num_ranks": 2, "parallel": ParallelConfig(**own), **TERMS}
    config.teacher = replace(config.teacher, **teacher, tokens_per_microbatch=HINTED_TOKENS)
    group = MegatronTeacher(config, 0, rank, 2, None)
    dp = group.layout.coordinates(rank).dp
    share = policy_batch.share([*SAMPLES], dp, group.layout.dp)
    found: dict[str, Any] = {"reports": group.reports}
    # Only reporting ranks send scores, so only they are read.
    for name, chunks in (("plain", policy_batch.chunks()), ("hinted", hinted_chunks())):
        scores = group.scores(share, chunks)
        found[name] = scores if group.reports else {}
    found["offloaded"] = group.memory.released_bytes > 0
    columns: list[ScoreColumn | None] = [None, None]
    dist.all_gather_object(columns, ScoreColumn.of(found["hinted"]) if group.reports else None)
    found["error"] = _error_of_nan(group, share)
    found |= _update(policy_batch.build_actor(config), [column for column in columns if column is not None])
    return found


def _error_of_nan(group: Any, share: Any) -> str:
    group.memory.load("params")
    with torch.no_grad():
        for parameter in group.chunks[0].parameters():
            parameter.fill_(float("nan"))
    try:
        group.scores(share, policy_batch.chunks())
    except NonFiniteError as error:
        return str(error)
    return ""


def _update(actor: Any, columns: list[ScoreColumn]) -> dict[str, Any]:
    """Train the policy on the scores, like in a second update with old log-probabilities."""
    assert not actor.teachers
    batch, _ = actor.recompute_logp(policy_batch.shares(actor)[::-1], hinted_chunks())
    for sample, logp in batch.old_logp.items():
        logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, actor.rank)])
    batch = actor.teacher_outputs(batch, None, columns)
    with policy_batch.complete_gradients(actor):
        _, reports = actor.accumulate_gradients(batch, 1)
    return {
        "loss": sum(report.loss for report in reports) if actor.counts_tokens else 0.0,
        "metrics": merge_metrics([r.metrics for r in reports]) if actor.counts_tokens else {},
        "gradients": policy_batch.gradient_pieces(actor),
    }


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return launch_cases(_measure, {2: CASES}, directories)


@pytest.fixture(scope="module")
def log_q(directories: dict[str, str]) -> dict[str, dict[str, dict[int, torch.Tensor]]]:
    """Log-probabilities of the vocabulary of each policy's teacher, by prompt and sample."""
    found = {}
    with torch.no_grad():
        for name in ("dense", "moe"):
            model = policy_batch.reference_model(directories[f"{name} hf_path"])
            hinted = {s: all_logp(model, s, hint(s) if HINTS[s] else None) for s in SAMPLES}
            found[name] = {"plain": {s: all_logp(model, s) for s in SAMPLES}, "hinted": hinted}
    return found


@pytest.mark.parametrize("prompts", ["plain", "hinted"])
@pytest.mark.parametrize("case", CASES)
def test_teacher_ranks_scores_equal_transformers(case: str, prompts: str, results: Any, log_q: Any) -> None:
    scores: dict[int, TokenScores] = {}
    for rank in results[case]:
        assert not scores.keys() & rank[prompts].keys()  # each sample is reported once
        scores |= rank[prompts]
    assert sorted(scores) == [*SAMPLES]
    for sample, wanted in log_q[CASES[case][1]][prompts].items():
        tokens = policy_batch.sequence(sample)[policy_batch.PROMPTS[sample] :][policy_batch.trained(sample) > 0]
        at_tokens = wanted.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0]
        found, best = scores[sample], wanted.topk(K)
        assert (found.logp.dtype, found.top_logp.dtype, found.top_ids.dtype) == (np.float32, np.float32, np.int32)
        np.testing.assert_allclose(found.logp, at_tokens.numpy(), rtol=RELATIVE, atol=TOLERANCE)
        assert found.top_ids.tolist() == best.indices.tolist()
        listed = outcomes(best.values.exp()).log().numpy()
        np.testing.assert_allclose(found.top_logp, listed, rtol=RELATIVE, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_policy_gradients_from_teacher_ranks_equal_float64(case: str, results: Any, directories: Any) -> None:
    model = CASES[case][1]
    loss, kl, gradients = hinted_update(directories[model], TERMS, directories[f"{model} hf_path"])
    ranks = results[case]
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    check_gradients([rank["gradients"] for rank in ranks], gradients, TOLERANCE)
    metrics = merge_metrics([rank["metrics"] for rank in ranks])
    assert metrics["distillation/kl_loss"].value == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_teacher_ranks_offload_and_name_bad_samples(case: str, results: Any) -> None:
    assert all(rank["offloaded"] for rank in results[case])
    assert all("output of the teacher of sample" in rank["error"] for rank in results[case])
