"""REAL: the loss of all groups equals the paper's, in value and gradient, however the update is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_rl.algorithms import aggregate_loss, compute_policy_loss, policy_loss
from mcore_rl.algorithms.group_scores import group_terms
from tests.unit.algorithms.loss_oracles import classifier_loss
from tests.unit.algorithms.test_policy_losses_catalogue import make

TAU = 0.3
GROUPS = torch.tensor([7, 2, 7, 2, 7, 2, 9, 9, 9])
LABELS = torch.tensor([1.0, -0.5, -2.0, 0.1, 3.0, -0.5, 1.0, 2.0, 1.0])
"""Advantages of the responses; all of the last group are positive."""


@pytest.fixture
def given() -> dict[str, torch.Tensor]:
    """Nine responses of different lengths in groups of three."""
    mask = torch.arange(9)[None] < torch.tensor([3, 9, 1, 4, 5, 2, 6, 7, 8])[:, None]
    mask[:, 1] &= torch.arange(9) != 4  # a token in the middle that is not trained
    return make(3, (9, 9), mask=mask) | {"advantages": LABELS[:, None].expand(9, 9).double().contiguous()}


def reference(given: dict[str, torch.Tensor], groups: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Compute the mean over the groups, and its gradient by autograd, with the scores as functions of logp."""
    logp, mask = given["logp"].clone().requires_grad_(), given["mask"]
    scores = ((logp - given["old_logp"]) * mask).sum(1) / mask.sum(1)
    losses = [
        classifier_loss(list(scores[groups == group]), LABELS[groups == group].tolist(), TAU)
        for group in groups.unique()
    ]
    total = torch.stack([torch.as_tensor(loss, dtype=torch.float64) for loss in losses]).mean()
    total.backward()
    assert logp.grad is not None
    return total.item(), logp.grad


def test_real_equals_mean_of_group_losses(given: dict[str, torch.Tensor]) -> None:
    logp = given["logp"].clone().requires_grad_()
    result = compute_policy_loss("real", **{**given, "logp": logp}, group_ids=GROUPS, tau=TAU)
    loss = aggregate_loss(result.loss, given["mask"], "seq-mean-token-mean")
    loss.backward()
    value, gradient = reference(given, GROUPS)
    assert loss.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-11, atol=1e-15)
    assert gradient[:6].any(dim=1).all()
    assert not gradient[6:].any()


def test_real_slopes_are_bounded_by_temperature() -> None:
    """However far scores are, a response that is classified wrongly has the gradient 1 / tau, and no overflow."""
    scores = torch.tensor([-1e4, 1e4, 3.0], dtype=torch.float64)
    loss, slopes = policy_loss("real", tau=TAU).group_terms(scores, torch.tensor([1.0, -1.0, -1.0]).double(), None)
    assert slopes.tolist() == pytest.approx([-3 / TAU, 3 / TAU, 0.0])
    assert loss.tolist() == pytest.approx([2e4 / TAU] * 3)


def test_group_terms_of_divided_update_equal_whole(given: dict[str, torch.Tensor]) -> None:
    """Two ranks have parts of the same responses, as with context parallelism; a third one has other responses, of the
    same groups and of one more."""
    groups = torch.tensor([7, 2, 7, 2, 7, 2, 9, 9, 7])
    selected, samples = given["mask"] > 0, torch.arange(9)[:, None].expand(9, 9)
    flat = [values[selected] for values in (samples, given["logp"] - given["old_logp"], given["advantages"])]
    ranks = torch.where(flat[0] >= 6, 2, torch.arange(len(flat[0])) % 2)
    loss, tables = policy_loss("real", tau=TAU), []

    def terms_of(rank: int, all_reduce: Any) -> dict[int, tuple[float, float]]:
        known = {sample: int(groups[sample]) for sample in (range(6, 9) if rank == 2 else range(6))}
        part = tuple(values[ranks == rank] for values in flat)
        return group_terms(loss, [part], known, 12, all_reduce=all_reduce)

    for rank in range(3):
        terms_of(rank, lambda table: tables.append(table.clone()) or table)
    found = {sample: pair for rank in range(3) for sample, pair in terms_of(rank, lambda _: sum(tables)).items()}
    whole = compute_policy_loss("real", **given, group_ids=groups, tau=TAU)
    expected = [float(row[mask][0]) for row, mask in zip(whole.loss, selected, strict=True)]
    assert [found[sample][0] for sample in range(9)] == pytest.approx(expected, rel=1e-12)
    slopes = [abs(found[sample][1]) for sample in range(9) for _ in range(int(selected[sample].sum()))]
    assert whole.metrics["gradient_weight"].value == pytest.approx(sum(slopes) / len(slopes))


def test_group_terms_skip_responses_without_tokens() -> None:
    """A response that is not trained has terms of 0 and does not count as a response of its group."""
    loss, none = policy_loss("real", tau=TAU), torch.zeros(0)
    two = (torch.tensor([0, 0, 2]), torch.tensor([0.2, 0.4, -0.1]), torch.tensor([1.0, 1.0, -1.0]))
    found = group_terms(loss, [two, (none.long(), none, none)], {0: 5, 1: 5, 2: 5}, 4)
    without = group_terms(loss, [two], {0: 5, 2: 5}, 4)
    assert found == without | {1: (0.0, 0.0)}
    scores = torch.tensor([0.3, -0.1], dtype=torch.float64)
    assert found[0][0] == pytest.approx(classifier_loss(list(scores), [1.0, -1.0], TAU).item(), rel=1e-6)
