"""Difference between the log-probabilities of the policy and of the engine's records."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mcore_rl.algorithms.kl import sums_in_both_directions
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.types import Correlation, LogpGap, Max, Mean, Metric


def mismatch(batch: MicroBatch, logp: torch.Tensor) -> dict[str, Metric]:
    """Return the metrics of the difference between the log-probabilities of the policy and of the engine's records.

    kl and kl_low_var: k1 and k3 estimates of KL(rollout || policy), for the tokens that the engine sampled.
    kl_reverse and kl_reverse_low_var: the same for KL(policy || rollout), see sums_in_both_directions.
    logp_diff_fresh_mean: only tokens that were sampled with the current weights. kept_tokens_mean: size of the set that
    a token was sampled from, if recorded; the means of differences then leave out tokens that were alone in their set,
    whose difference is always 0.
    """
    trainer, engine = logp.double(), batch.logp_rollout.double()
    difference = (trainer - engine).abs()
    largest = difference.max() if len(difference) else difference.sum()
    uncertain = torch.ones_like(engine) if batch.kept is None else (engine < 0).double()
    fresh = (batch.staleness == 1).double() * uncertain
    sums = [
        difference @ uncertain,
        uncertain.sum(),
        difference @ fresh,
        fresh.sum(),
        largest,
    ]
    sums += [
        *sums_in_both_directions(trainer, engine),
        trainer.sum(),
        engine.sum(),
        trainer @ trainer,
        engine @ engine,
        trainer @ engine,
    ]
    # One device-to-host transfer instead of one per number.
    total, num_uncertain, fresh_total, num_fresh, most, *rest = torch.stack(sums).tolist()
    (k1, low_var, reverse_k1, reverse_low_var), moments = rest[:4], rest[4:]
    kept: dict[str, Metric] = {}
    if batch.kept is not None:
        kept["rollout/kept_tokens_mean"] = Mean(batch.kept.num_ids, len(difference))
    return kept | {
        "rollout/kl": Mean(k1, len(difference)),
        "rollout/kl_low_var": Mean(low_var, len(difference)),
        "rollout/kl_reverse": Mean(reverse_k1, len(difference)),
        "rollout/kl_reverse_low_var": Mean(reverse_low_var, len(difference)),
        "rollout/logp_diff_mean": Mean(total, num_uncertain),
        "rollout/logp_diff_fresh_mean": Mean(fresh_total, num_fresh),
        "rollout/logp_diff_max": Max(most),
        "rollout/logp_pearson": Correlation(len(difference), *moments),
    }


def logp_gap(found: Sequence[tuple[MicroBatch, torch.Tensor]], *, own_routing: bool) -> LogpGap:
    """Summarize the differences between the policy's log-probabilities, by micro-batch, and the engine's.

    Tokens with log-probability 0 in the engine are left out: the only token of a truncated set has it in any model.
    """
    engine = [batch.logp_rollout.double() for batch, _ in found]
    differences = [(logp.double() - known).abs()[known < 0] for (_, logp), known in zip(found, engine, strict=True)]
    return LogpGap.between((value for part in differences for value in part.tolist()), own_routing=own_routing)
