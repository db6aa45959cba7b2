"""Loss, rewards, weights and metrics of pairs, against references in float64 written from the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_rl.algorithms.preference import compare_scores, describe_pairs, score_pairs
from mcore_rl.algorithms.registry import compute_policy_loss
from mcore_rl.config.objectives import PreferenceConfig

FORMS: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.3},
    "length-normalized": {"beta": 2.0, "length_normalized": True},
    "reference-free": {"beta": 0.2, "reference_free": True},
    "SimPO": {"beta": 2.5, "length_normalized": True, "reference_free": True, "target_margin": 1.4},
    "conservative": {"beta": 0.5, "label_smoothing": 0.2},
    "all": {"beta": 1.5, "length_normalized": True, "target_margin": 0.3, "label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.2},
    "TRL's ipo": {"loss": "ipo", "beta": 0.7, "length_normalized": True},
    "hinge": {"loss": "hinge", "beta": 0.4, "target_margin": 0.2},
    "robust": {"loss": "robust", "beta": 0.5, "label_smoothing": 0.2},
    "RPO": {"beta": 0.3, "sft_weight": 0.8},
}
LENGTHS = [(3, 5), (1, 4), (6, 6), (2, 1)]


def token_logp(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities of the tokens of both responses of each pair, leaves with gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple((-3 * torch.rand(n, generator=generator, dtype=torch.float64)).requires_grad_() for n in pair)  # type: ignore[misc]
        for pair in LENGTHS
    ]


def sums(tokens: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.stack([chosen.sum(), rejected.sum()]) for chosen, rejected in tokens])


def papers_loss(
    policy: list[tuple[torch.Tensor, torch.Tensor]], reference: list[tuple[torch.Tensor, torch.Tensor]], form: str
) -> torch.Tensor:
    """Equation 7 of arXiv 2305.18290 with its variants, pair by pair."""
    options = {"length_normalized": False, "reference_free": False, "target_margin": 0.0, "label_smoothing": 0.0}
    options |= {"loss": "sigmoid", "sft_weight": 0.0} | FORMS[form]
    losses = []
    for pair, ref_pair in zip(policy, reference, strict=True):
        rewards = []
        for logp, ref_logp in zip(pair, ref_pair, strict=True):
            total = logp.sum() - (0.0 if options["reference_free"] else ref_logp.sum())
            rewards.append(options["beta"] * (total / len(logp) if options["length_normalized"] else total))
        h = rewards[0] - rewards[1] - options["target_margin"]
        right, swapped = torch.log(1 / (1 + torch.exp(-h))), torch.log(1 / (1 + torch.exp(h)))
        e, beta = options["label_smoothing"], options["beta"]
        loss = {
            "sigmoid": -(1 - e) * right - e * swapped,
            # Equation 17 of arXiv 2310.12036, with tau = beta.
            "ipo": ((rewards[0] - rewards[1]) / beta - 1 / (2 * beta)) ** 2,
            "hinge": torch.clamp(1 - h, min=0),
            "robust": (-(1 - e) * right + e * swapped) / (1 - 2 * e),
        }[options["loss"]]
        losses.append(loss - options["sft_weight"] * pair[0].mean())
    return torch.stack(losses)


@pytest.mark.parametrize("form", FORMS)
def test_score_pairs_loss_and_weights_equal_the_papers(form: str) -> None:
    policy, reference = token_logp(1), token_logp(2)
    section = PreferenceConfig(**FORMS[form])
    with torch.no_grad():
        ref = None if section.reference_free else sums(reference)
        scored = score_pairs(sums(policy), ref, torch.tensor(LENGTHS), section)
    expected = papers_loss(policy, reference, form)
    torch.testing.assert_close(scored.loss, expected.detach(), rtol=1e-13, atol=0)
    expected.sum().backward()
    for pair, weights in zip(policy, scored.weights, strict=True):
        for logp, weight in zip(pair, weights, strict=True):
            torch.testing.assert_close(logp.grad, -weight.expand_as(logp), rtol=1e-12, atol=0)


def test_dpo_token_loss_has_the_gradient_of_the_mean_over_pairs() -> None:
    """The sum over the tokens of all responses, each with its pair's weight, as ranks compute it."""
    policy, reference = token_logp(3), token_logp(4)
    with torch.no_grad():
        section = PreferenceConfig(**FORMS["sigmoid"])
        weights = score_pairs(sums(policy), sums(reference), torch.tensor(LENGTHS), section).weights
    leaves = [logp for pair in policy for logp in pair]
    expected = torch.autograd.grad(papers_loss(policy, reference, "sigmoid").mean(), leaves)
    total = torch.zeros((), dtype=torch.float64)
    for logp, weight in zip(leaves, weights.reshape(-1), strict=True):
        given = weight.expand_as(logp)
        total = total + compute_policy_loss("dpo", logp=logp, mask=torch.ones_like(logp), advantages=given).loss.sum()
    torch.testing.assert_close(torch.autograd.grad(total / len(LENGTHS), leaves), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("centering", [0.0, 0.01])
def test_compare_scores_loss_and_weights_equal_the_papers(centering: float) -> None:
    """Equation 2 of arXiv 2307.09288, with the term of arXiv 2312.09244."""
    scores = torch.tensor([[1.0, -0.5], [0.2, 0.9], [-2.0, -2.0]], dtype=torch.float64, requires_grad=True)
    margins = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    chosen, rejected = scores.unbind(1)
    loss = torch.log(1 + torch.exp(rejected - chosen + margins)) + centering * (chosen + rejected) ** 2
    scored = compare_scores(scores.detach(), margins, PreferenceConfig(center_rewards_coefficient=centering))
    torch.testing.assert_close(scored.loss, loss.detach(), rtol=1e-13, atol=0)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    torch.testing.assert_close(scored.weights, -gradient, rtol=1e-12, atol=1e-15)


def test_describe_pairs_counts_equal_rewards_as_half() -> None:
    policy = torch.tensor([[-1.0, -2.0], [-5.0, -3.0], [-4.0, -4.0], [-1.0, -9.0]])
    reference = torch.tensor([[-1.5, -1.5], [-5.0, -6.0], [-4.0, -4.0], [-1.0, -9.0]])
    section = PreferenceConfig(beta=2.0)
    scored = score_pairs(policy, reference, torch.ones(4, 2), section)
    metrics = {name: metric.value for name, metric in describe_pairs(scored, "val/").items()}
    # Rewards: (1, -1), (0, 6), (0, 0), (0, 0).
    assert metrics == {
        "val/accuracy": pytest.approx((1 + 0 + 0.5 + 0.5) / 4),
        "val/margin": pytest.approx((2 - 6) / 4),
        "val/chosen_reward": pytest.approx(0.25),
        "val/rejected_reward": pytest.approx(5 / 4),
        "val/chosen_logp": pytest.approx(-11 / 4),
        "val/rejected_logp": pytest.approx(-18 / 4),
    }


def test_score_pairs_extreme_margins_stay_finite() -> None:
    policy = torch.tensor([[-1e4, 0.0], [0.0, -1e4]])
    scored = score_pairs(policy, None, torch.ones(2, 2), PreferenceConfig(beta=1.0))
    assert scored.loss.tolist() == [1e4, 0.0]
    assert scored.weights.tolist() == [[1.0, -1.0], [0.0, -0.0]]


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_losses_of_pairs_without_weights_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs advantages"):
        compute_policy_loss(name, logp=torch.zeros(1, 2), mask=torch.ones(1, 2))
