"""Plain torch for the teacher's terms: probabilities, the policy's loss, and the reverse KL."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.distributed import policy_batch


def all_logp(model: torch.nn.Module, sample: int, prompt: np.ndarray | None = None) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at the trained tokens, at their temperatures. prompt: int [P], instead
    of the sample's own."""
    own, response = np.split(policy_batch.sequence(sample).astype(np.int64), [policy_batch.PROMPTS[sample]])
    start = own if prompt is None else prompt.astype(np.int64)
    tokens, trained = torch.from_numpy(np.concatenate([start, response])), policy_batch.trained(sample)
    positions = len(start) + np.flatnonzero(trained)
    divisor = torch.from_numpy(policy_batch.temperatures(sample)[trained > 0]).double()
    divisor = divisor.nan_to_num(policy_batch.TEMPERATURE)[:, None]
    return torch.log_softmax(model(tokens[None]).logits[0][positions - 1] / divisor, -1)


def ppo_loss(logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logp - old)
    bounded = -advantage * ratio.clamp(1 - policy_batch.CLIP_LOW, 1 + policy_batch.CLIP_HIGH)
    loss = torch.maximum(-advantage * ratio, bounded)
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * policy_batch.DUAL_CLIP), loss)


def outcomes(probabilities: torch.Tensor) -> torch.Tensor:
    """Add the probability of all other tokens."""
    return torch.cat((probabilities, 1 - probabilities.sum(1, keepdim=True)), 1)


def distance(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - log_q)).sum(1)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor, terms: dict[str, Any]) -> torch.Tensor:
    if k := terms.get("top_k"):
        best = log_q.topk(k).indices
        p, q = log_p.exp().gather(1, best), log_q.exp().gather(1, best)
        if terms.get("rest") == "renormalize":
            p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
        else:
            p, q = outcomes(p), outcomes(q)
        return distance(p, q.log())
    return distance(log_p.exp(), log_q)
