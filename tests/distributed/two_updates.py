"""Whole updates of an actor on the policy's batch, and the same updates by AdamW on transformers' model in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mcore_rl.config.schema import Config
from mcore_rl.types import Metric, RankShare, merge_metrics
from tests.distributed import policy_batch
from tests.tiny_models import checkpoint_tensors

LR, WARMUP, WEIGHT_DECAY, CLIP_GRAD = 4e-3, 1, 0.1, 0.5
# Adam divides by the gradient's magnitude. With a tiny eps, entries of pure rounding noise would change by lr.
EPS = 1e-2


def make_config(directory: str, parallel: dict[str, int]) -> Config:
    """Configuration whose updates can be compared with AdamW in `reference`."""
    config = policy_batch.config(directory, parallel, 24)
    optimizer = config.actor.optimizer
    optimizer.lr, optimizer.warmup_steps, optimizer.eps = LR, WARMUP, EPS
    optimizer.weight_decay, optimizer.clip_grad = WEIGHT_DECAY, CLIP_GRAD
    return config


def make_actor(directory: str, parallel: dict[str, int], **changes: Any) -> tuple[Any, list[RankShare]]:
    """Build an actor and its shares of both updates, within a process group. changes: by section of the
    configuration."""
    config = make_config(directory, parallel)
    for section, values in changes.items():
        for name, value in values.items():
            setattr(getattr(config, section), name, value)
    actor = policy_batch.build_actor(config)
    return actor, policy_batch.shares(actor)


def train(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    """By case (kind of model, layout, optional settings of the actor): this rank's slices of the final weights, metrics
    of passes and updates, and the final policy's log-probabilities of the first update's samples."""
    from mcore_rl.megatron.optim import optimizer

    optimizer.BUCKET_PARAMETERS = 1000  # of several thousand, so that modules are in different buckets
    results = {}
    for name, (kind, parallel, *changes) in cases.items():
        actor, shares = make_actor(directories[kind], parallel, actor=dict(*changes))
        chunks = policy_batch.chunks()
        compared = actor.compare(shares[0], chunks)
        gaps = [gap.mean for gap in actor.compare_logp(shares, chunks)]
        # The first share twice, like a second epoch: its samples must be recomputed once.
        batch, recomputed = actor.recompute_logp([*shares, shares[0]], chunks)
        metrics = [recomputed, *(actor.update(batch, index) for index in range(len(shares)))]
        # The first update computes the old log-probabilities of its own samples itself.
        of_first = {key: metrics[1].pop(key) for key in list(metrics[1]) if key.startswith("rollout/")}
        metrics[0] = merge_metrics([metrics[0], of_first])
        metrics += [compared, dict(zip(GAPS, gaps, strict=True))]
        # Directly after the step, before any gathering of parameters.
        batch, _ = actor.recompute_logp(shares[::-1], chunks)
        after = {
            sample: (policy_batch.held(sample, actor.layout, rank), logp.cpu().numpy().copy())
            for sample, logp in batch.old_logp.items()
        }
        actor.gather_parameters()
        results[name] = policy_batch.hf_pieces(actor), metrics, after
    return results


GAPS = ("gap of update 0", "gap of update 1")
"""Names of the mean differences that compare_logp returns."""

Joined = tuple[dict[str, torch.Tensor], list[dict[str, Metric]], dict[int, np.ndarray]]


def join(ranks: list[dict[str, Any]], case: str) -> Joined:
    """Combine the results of `train` of all ranks: final weights by HF name, merged metrics of the pass before the
    updates and of each update, and the final policy's log-probabilities of the first update's samples."""
    weights = policy_batch.assemble([rank[case][0] for rank in ranks])
    metrics = [merge_metrics(list(parts)) for parts in zip(*(rank[case][1] for rank in ranks), strict=True)]
    return weights, metrics, _whole([rank[case][2] for rank in ranks])


def _whole(ranks: list[dict[int, Any]]) -> dict[int, np.ndarray]:
    """Assemble every sample's values from each rank's mask and values."""
    whole: dict[int, np.ndarray] = {}
    for sample, (on_rank, values) in (item for rank in ranks for item in rank.items()):
        whole.setdefault(sample, np.full(len(on_rank), np.nan, np.float32))[on_rank] = values
    return whole


def reference(directory: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[int, torch.Tensor]]:
    """The same results from transformers' model with torch's AdamW, on the CPU."""
    model = policy_batch.reference_model(directory)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, eps=EPS, betas=(0.9, 0.999))
    with torch.no_grad():
        old = {
            sample: policy_batch.reference_logp(model, sample)[0]
            for update in policy_batch.UPDATES
            for sample in update
        }
        plain = {s: policy_batch.reference_logp(model, s, unrecorded=1.0)[0] for s in policy_batch.UPDATES[0]}
    metrics = [_differences(old)]
    for index, samples in enumerate(policy_batch.UPDATES):
        optimizer.zero_grad()
        loss, figures = policy_batch.reference_loss(model, samples, old)
        loss.backward()
        rate = LR * min(1, (index + 1) / (WARMUP + 1))
        for group in optimizer.param_groups:
            group["lr"] = rate
        figures |= {"actor/loss": float(loss.detach()), "actor/lr": rate}
        figures |= _norms_of_experts(model)
        figures["actor/grad_norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD))
        figures["actor/trained_tokens"] = sum(int(policy_batch.trained(sample).sum()) for sample in samples)
        optimizer.step()
        metrics.append(figures)
    metrics.append(_differences(plain))  # for the comparison, which precedes the updates
    of_updates = [_differences({s: old[s] for s in samples}) for samples in policy_batch.UPDATES]
    metrics.append({name: found["rollout/logp_diff_mean"] for name, found in zip(GAPS, of_updates, strict=True)})
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights |= {name: bias for name, bias in model.named_buffers() if name.endswith("correction_bias")}
    with torch.no_grad():
        after = {sample: policy_batch.reference_logp(model, sample)[0] for sample in policy_batch.UPDATES[0]}
    return checkpoint_tensors(model, weights), metrics, after


def _norms_of_experts(model: torch.nn.Module) -> dict[str, float]:
    """Gradient norms of all routers and of all experts; empty for a dense model."""
    norms = {}
    for kind, part in (("router", ".gate."), ("experts", "experts.")):
        gradients = [p.grad.flatten() for name, p in model.named_parameters() if part in name]
        if gradients:
            norms[f"actor/grad_norm_{kind}"] = float(torch.cat(gradients).norm())
    return norms


def _differences(logp: dict[int, torch.Tensor]) -> dict[str, float]:
    given = {s: policy_batch.logp_rollout(s)[policy_batch.trained(s) > 0] for s in logp}
    gaps = torch.cat([(logp[s] - torch.from_numpy(given[s])).abs() for s in sorted(logp)])
    return {"rollout/logp_diff_mean": float(gaps.mean()), "rollout/logp_diff_max": float(gaps.max())}
