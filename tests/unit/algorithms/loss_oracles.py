"""Reference implementations of the policy losses, written from the papers: float64, one token at a time, plain loops.

Every function takes lists of rows of scalars (logp: 0-dimensional tensors, so that autograd computes the gradient) and
returns the loss of each trained token as {(row, column): scalar tensor}.
"""

from __future__ import annotations

import math

import torch


def tokens(mask):
    return [(i, t) for i, row in enumerate(mask) for t, m in enumerate(row) if m]


def row_tokens(mask, i):
    return [t for t, m in enumerate(mask[i]) if m]


def ppo_objective(ratio, advantage, low, high, dual):
    """Compute eq. 7 of PPO, to be maximized; the dual clip is max(., c A) for A < 0."""
    objective = min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage, key=lambda x: x.item())
    if dual is not None and advantage < 0:
        objective = max(objective, torch.tensor(dual * advantage, dtype=torch.float64), key=lambda x: x.item())
    return objective


def ppo_clip(logp, given, mask, clip_low=0.2, clip_high=0.2, dual_clip=None):
    old, advantages = given["old_logp"], given["advantages"]
    return {
        (i, t): -ppo_objective(torch.exp(logp[i][t] - old[i][t]), advantages[i][t], clip_low, clip_high, dual_clip)
        for i, t in tokens(mask)
    }


def reinforce(logp, given, mask):
    return {(i, t): -given["advantages"][i][t] * logp[i][t] for i, t in tokens(mask)}


def cispo(logp, given, mask, clip_low=1.0, clip_high=4.0, anchor="old"):
    losses = {}
    for i, t in tokens(mask):
        weight = torch.clamp(torch.exp(logp[i][t] - anchor_of(given, anchor)[i][t]), 1 - clip_low, 1 + clip_high)
        losses[i, t] = -weight.detach() * given["advantages"][i][t] * logp[i][t]
    return losses


def anchor_of(given, anchor):
    return given["old_logp" if anchor == "old" else "rollout_logp"]


def sapo(logp, given, mask, tau_pos=1.0, tau_neg=1.05):
    losses = {}
    for i, t in tokens(mask):
        advantage = given["advantages"][i][t]
        tau = tau_pos if advantage > 0 else tau_neg
        ratio = torch.exp(logp[i][t] - given["old_logp"][i][t])
        losses[i, t] = -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    return losses


def dppo(logp, given, mask, divergence, low, high, ratio_cap, anchor, mask_anchor):
    """Compute M r A, to be maximized, with M = 0 for a token that moves away from the anchor of the mask and is too far
    away."""
    losses = {}
    for i, t in tokens(mask):
        advantage, behave = given["advantages"][i][t], anchor_of(given, anchor)[i][t]
        ratio = torch.exp(logp[i][t] - behave)
        center = anchor_of(given, mask_anchor or anchor)[i][t]
        far, moved = divergence(math.exp(logp[i][t].item()), math.exp(center)), logp[i][t] - center
        masked = (advantage > 0 and moved > 0 and far > high) or (advantage < 0 and moved < 0 and far > low)
        if ratio_cap is not None and ratio > ratio_cap:
            ratio = ratio_cap * torch.exp(logp[i][t] - logp[i][t].detach())
        losses[i, t] = 0 * ratio if masked else -advantage * ratio
    return losses


def dppo_tv(logp, given, mask, clip_low=0.15, clip_high=0.15, ratio_cap=None, anchor="rollout", mask_anchor=None):
    """Use half of the sum of |p - q| over the two outcomes. Test data has probabilities above 1."""

    def total_variation(p, q):
        p, q = min(p, 1.0), min(q, 1.0)
        return 0.5 * (abs(p - q) + abs((1 - p) - (1 - q)))

    return dppo(logp, given, mask, total_variation, clip_low, clip_high, ratio_cap, anchor, mask_anchor)


def dppo_kl(logp, given, mask, clip_low=0.05, clip_high=0.05, ratio_cap=None, anchor="rollout", mask_anchor=None):
    """Use the KL divergence of the two outcomes, from the anchor to the policy."""

    def kl(p, q):
        p, q = min(p, math.exp(-1e-12)), min(q, math.exp(-1e-12))
        return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))

    return dppo(logp, given, mask, kl, clip_low, clip_high, ratio_cap, anchor, mask_anchor)


def vespo(logp, given, mask, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0, anchor="rollout"):
    losses = {}
    for i, row in enumerate(logp):
        weight = 1.0
        for t in row_tokens(mask, i):
            weight *= math.exp(row[t].item() - anchor_of(given, anchor)[i][t])
        for t in row_tokens(mask, i):
            advantage = given["advantages"][i][t]
            k, decay = (k_pos, lambda_pos) if advantage >= 0 else (k_neg, lambda_neg)
            losses[i, t] = -(weight**k) * math.exp(decay * (1 - weight)) * advantage * row[t]
    return losses


def dro(logp, given, mask, beta=0.05, anchor="rollout"):
    """Compute the squared error (A - beta log ratio)^2 / (2 beta) without A^2 / (2 beta), plus A log q (a constant)."""
    losses = {}
    for i, t in tokens(mask):
        advantage, behave = given["advantages"][i][t], anchor_of(given, anchor)[i][t]
        error = (advantage - beta * (logp[i][t] - behave)) ** 2 / (2 * beta)
        losses[i, t] = error - advantage**2 / (2 * beta) - advantage * behave
    return losses


def fipo(
    logp, given, mask, clip_low=0.2, clip_high=0.28, dual_clip=10.0, decay_tokens=32.0,
    influence_low=0.0, influence_high=0.2, safety_ratio=10.0,
):  # fmt: skip
    losses = {}
    for i, row in enumerate(logp):
        trained = row_tokens(mask, i)
        difference = {t: row[t].item() - given["old_logp"][i][t] for t in trained}
        for place, t in enumerate(trained):
            future = 0.0
            for distance, later in enumerate(trained[place:]):
                if math.exp(difference[later]) <= dual_clip:
                    future += 0.5 ** (distance / decay_tokens) * difference[later]
            influence = min(max(math.exp(future), 1 - influence_low), 1 + influence_high)
            ratio, advantage = torch.exp(row[t] - given["old_logp"][i][t]), given["advantages"][i][t]
            if advantage < 0 and ratio > safety_ratio:
                influence = min(max(influence, 0.8), 1.0)
            losses[i, t] = -ppo_objective(ratio, influence * advantage, clip_low, clip_high, dual_clip)
    return losses


def gspo(logp, given, mask, clip_low=3e-4, clip_high=4e-4):
    losses = {}
    for i, row in enumerate(logp):
        trained = row_tokens(mask, i)
        if not trained:
            continue
        product = torch.ones((), dtype=torch.float64)
        for t in trained:
            product = product * torch.exp(row[t] - given["old_logp"][i][t])
        s = product ** (1 / len(trained))
        for t in trained:
            probability = torch.exp(row[t])
            ratio = s.detach() * probability / probability.detach()
            losses[i, t] = -ppo_objective(ratio, given["advantages"][i][t], clip_low, clip_high, None)
    return losses


def gmpo(logp, given, mask, clip_low=0.4, clip_high=0.4):
    """Compute A times the 1 / |o|-th power of prod_t min((rho^sgn A), clip(rho, e^-low, e^high)^sgn A)^(sgn A)."""
    losses = {}
    for i, row in enumerate(logp):
        trained = row_tokens(mask, i)
        product = torch.ones((), dtype=torch.float64)
        for t in trained:
            rho = torch.exp(row[t] - given["old_logp"][i][t])
            sign = math.copysign(1.0, given["advantages"][i][t])
            bounded = torch.clamp(rho, math.exp(-clip_low), math.exp(clip_high))
            product = product * min(rho**sign, bounded**sign, key=lambda x: x.item()) ** sign
        for t in trained:
            losses[i, t] = -given["advantages"][i][t] * product ** (1 / len(trained))
    return losses


def covariances(logp, given, mask):
    where = tokens(mask)
    mean_logp = sum(logp[i][t].item() for i, t in where) / len(where)
    mean_advantage = sum(given["advantages"][i][t] for i, t in where) / len(where)
    return {(i, t): (logp[i][t].item() - mean_logp) * (given["advantages"][i][t] - mean_advantage) for i, t in where}


def kl_cov(logp, given, mask, cov_ratio=2e-3, kl_coef=1.0):
    covariance = covariances(logp, given, mask)
    number = max(1, math.floor(cov_ratio * len(covariance)))
    chosen = sorted(covariance, key=lambda token: -covariance[token])[:number]
    losses = {}
    for i, t in tokens(mask):
        difference = logp[i][t] - given["old_logp"][i][t]
        losses[i, t] = -torch.exp(difference) * given["advantages"][i][t]
        if (i, t) in chosen:
            losses[i, t] = losses[i, t] + kl_coef * torch.abs(difference)
    return losses


def clip_cov_eligible(logp, given, mask, clip_low=0.2, clip_high=0.2, cov_low=1.0, cov_high=5.0):
    covariance = covariances(logp, given, mask)
    eligible = []
    for i, t in tokens(mask):
        ratio = math.exp(logp[i][t].item() - given["old_logp"][i][t])
        advantage = given["advantages"][i][t]
        clipped = (advantage > 0 and ratio > 1 + clip_high) or (advantage < 0 and ratio < 1 - clip_low)
        if cov_low < covariance[i, t] < cov_high and not clipped:
            eligible.append((i, t))
    return eligible


def clip_cov(logp, given, mask, clip_low=0.2, clip_high=0.2, cov_ratio=1.0, cov_low=1.0, cov_high=5.0):
    """Require cov_ratio=1, which chooses all eligible tokens, so that nothing is random."""
    assert cov_ratio == 1.0
    chosen = clip_cov_eligible(logp, given, mask, clip_low, clip_high, cov_low, cov_high)
    losses = ppo_clip(logp, given, mask, clip_low, clip_high)
    return {token: 0 * loss if token in chosen else loss for token, loss in losses.items()}


def decoupled_ppo(logp, given, mask, clip_low=0.2, clip_high=0.2, dual_clip=None, prox="recomputed"):
    losses = {}
    for i, t in tokens(mask):
        behave, stale = given["rollout_logp"][i][t], given["staleness"][i][t]
        if prox == "loglinear":
            alpha = (stale - 1) / stale if stale > 0 else 0.0
            proximal = behave + alpha * (logp[i][t].item() - behave)
        else:
            proximal = given["prox_logp"][i][t]
        ratio = torch.exp(logp[i][t] - proximal)
        objective = ppo_objective(ratio, given["advantages"][i][t], clip_low, clip_high, dual_clip)
        losses[i, t] = -math.exp(proximal - behave) * objective
    return losses


def real(logp, given, mask, tau=0.5):
    """Classify the responses of one group with anchors of 0; every token has the loss of the group, and the gradient of
    the score of its response times the number of responses."""
    rows = [i for i, row in enumerate(mask) if any(row)]
    scores, labels = {}, {}
    for i in rows:
        gaps = [logp[i][t].item() - given["old_logp"][i][t] for t in row_tokens(mask, i)]
        scores[i] = torch.tensor(sum(gaps) / len(gaps), dtype=torch.float64, requires_grad=True)
        labels[i] = sum(given["advantages"][i][t] for t in row_tokens(mask, i))
    loss = classifier_loss([scores[i] for i in rows], [labels[i] for i in rows], tau)
    if not torch.is_tensor(loss):
        return {(i, t): 0 * logp[i][t] for i, t in tokens(mask)}
    slopes = dict(zip(rows, torch.autograd.grad(loss, [scores[i] for i in rows]), strict=True))
    return {(i, t): loss.item() + len(rows) * slopes[i] * (logp[i][t] - logp[i][t].item()) for i, t in tokens(mask)}


def classifier_loss(scores, labels, tau):
    """Compute the loss of a group; 0.0 without responses of both labels."""
    positive = [score for score, label in zip(scores, labels, strict=True) if label > 0]
    negative = [score for score, label in zip(scores, labels, strict=True) if label < 0]
    if not positive or not negative:
        return 0.0
    wrong = torch.log(1 + sum(torch.exp(score / tau) for score in negative))
    return wrong + torch.log(1 + sum(torch.exp(-score / tau) for score in positive)) + 0 * sum(scores)


ORACLES = {
    function.__name__: function
    for function in (
        *(ppo_clip, reinforce, cispo, gspo, gmpo, kl_cov, clip_cov, decoupled_ppo),
        *(sapo, dppo_tv, dppo_kl, vespo, dro, fipo, real),
    )
}


def loss_and_gradient(name, given, options, upstream):
    """Return the loss [B, T] and the gradient of sum(upstream * loss) with respect to logp, in float64."""
    lists = {key: value.double().tolist() for key, value in given.items()}
    leaves = [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in row] for row in lists["logp"]]
    losses = ORACLES[name](leaves, lists, lists["mask"], **options)
    values, gradient = torch.zeros(2, *given["logp"].shape, dtype=torch.float64)
    total = sum(upstream[token].double() * loss for token, loss in losses.items())
    if total.requires_grad:  # a dual clip may make all losses constant
        total.backward()
    for (i, t), loss in losses.items():
        values[i, t] = loss.detach()
    for i, row in enumerate(leaves):
        for t, leaf in enumerate(row):
            gradient[i, t] = 0.0 if leaf.grad is None else leaf.grad
    return values, gradient
