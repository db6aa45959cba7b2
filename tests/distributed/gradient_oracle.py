"""One update of the policy on all ranks, in several cases, compared with plain torch on transformers' model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from mcore_rl.types import Metric, merge_metrics
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import checkpoint_tensors

# Relative to the tensor's largest entry. Gradients are float32 sums of some hundred terms, in an order that depends on
# the layout; 2e-6 was the largest difference measured, against float64. A factor of the DP size, a lost or doubled
# token or a missing reduction is off by 1e-2 or more.
TOLERANCE = 1e-5
ONE_MICROBATCH = 10_000
SMALL = 24
"""Tokens of a micro-batch: a little above the longest sequence, and a multiple of 2 * cp."""
Cases = Mapping[int, Mapping[str, Any]]
"""Cases by number of ranks and name."""


def case_parameters(cases: Cases) -> list[Any]:
    """Return pytest parameters (number of ranks, name of the case)."""
    return [pytest.param(size, name, id=name) for size, of_size in cases.items() for name in of_size]


def launch_cases(worker: Callable[..., dict[str, Any]], cases: Cases, *arguments: Any) -> dict[str, list[Any]]:
    """Run `worker(rank, *arguments, cases)` in one launch per number of ranks. Returns the results of all
    ranks by case."""
    found = {}
    for size, of_size in cases.items():
        ranks = launch(worker, size, *arguments, of_size)
        found |= {name: [rank[name] for rank in ranks] for name in of_size}
    return found


def accumulate(actor: Any) -> tuple[float, dict[str, Metric]]:
    """Accumulate the gradients of the first update, as if it were the second one: its old log-probabilities differ from
    the current ones by policy_batch.drift. Returns this rank's part of the loss, and metrics."""
    place = actor.layout.coordinates(actor.rank)
    batch, _ = actor.recompute_logp(policy_batch.shares(actor)[::-1], policy_batch.chunks())
    for sample, logp in batch.old_logp.items():
        logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, actor.rank)])
    with policy_batch.complete_gradients(actor):
        _, reports = actor.accumulate_gradients(batch, 1)
    return sum(report.loss for report in reports) * (place.tp == 0), merge_metrics([r.metrics for r in reports])


def reference_update(
    directory: str,
    loss_of: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    added: Callable[[torch.nn.Module], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Compute the first update in float64. Returns the loss, the mean of a metric, and gradients by HF name.

    loss_of(sample, log-probabilities of its trained tokens): sum of its tokens' losses, and values of the metric.
    added(model): loss that is trained but not part of the returned one, and values of the metric that replace the
        others.
    """
    model, samples = policy_batch.reference_model(directory), policy_batch.UPDATES[0]
    weights = policy_batch.loss_weights(samples).astype(float)
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for sample in samples:
        logp, entropy = policy_batch.reference_logp(model, sample)
        loss, metric = loss_of(sample, logp)
        total = total + weights[sample] * (loss - policy_batch.ENTROPY_COEFFICIENT * entropy.sum())
        metrics.append(metric)
    more = total
    if added is not None:
        loss, metric = added(model)
        more, metrics = total + loss, [metric]
    more.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(total.detach()), float(torch.cat(metrics).mean()), checkpoint_tensors(model, gradients)


def check_gradients(pieces: list[list[Any]], expected: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    """Compare the slices of all ranks with whole tensors: every gradient, by HF name, never by its norm."""
    found = policy_batch.assemble(pieces)
    assert found.keys() == expected.keys()
    wrong = {}
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        if not error <= tolerance:  # also NaN, an element that no rank wrote
            wrong[name] = error
    assert not wrong, f"{len(wrong)} of {len(expected)} gradients differ: {wrong}"
