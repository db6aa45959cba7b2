"""Training on pairs of a chosen and a rejected response (DPO)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mcore_rl.algorithms.preference import ScoredPairs, describe_pairs, score_pairs
from mcore_rl.config.objectives import PreferenceConfig
from mcore_rl.ports import Actor
from mcore_rl.types import Batch, Mean, Metric, merge_metrics

LOSS = "actor/loss"


@dataclass(frozen=True)
class PairObjective:
    """Direct preference optimization: one update per batch, from the weights of its pairs.

    next_batch: batch of the next pairs, in which responses 2 i and 2 i + 1 are the chosen and the rejected response of
        pair i. validation: batches of the validation pairs, in order; None without any. parts: pairs of the validation
        with metrics of their own, int64 [n] by name.
    """

    section: PreferenceConfig
    next_batch: Callable[[], Batch]
    validation: Callable[[], Iterator[Batch]] | None = None
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def validates(self) -> bool:
        return self.validation is not None

    def train(self, actor: Actor) -> dict[str, Metric]:
        """Run one update on the next batch.

        Raises: NonFiniteError before the optimizer step with a non-finite log-probability, loss or gradient.
        """
        batch = self.next_batch()
        pairs, logp = self._scored(actor, batch)
        weighted = replace(batch, advantages=pairs.weights.reshape(-1).numpy().astype(np.float32))
        updated = actor.update(actor.recompute_logp(weighted))
        # The ranks sum weights times log-probabilities, which has the loss's gradient but another value.
        loss: dict[str, Metric] = {LOSS: Mean(float(pairs.loss.sum()), len(pairs.loss))}
        return updated | loss | describe_pairs(pairs, logp, "preference/")

    def validate(self, actor: Actor) -> dict[str, Metric]:
        """Compute loss, accuracy and margin of the validation pairs; `val/<metric>/<part>` for each part."""
        assert self.validation is not None
        metrics: list[Mapping[str, Metric]] = []
        first = 0
        for batch in self.validation():
            pairs, logp = self._scored(actor, batch)
            numbers = np.arange(first, first + len(pairs.loss))
            first += len(numbers)
            metrics.append(_validation_metrics(pairs, logp, ""))
            for name, members in self.parts.items():
                here = torch.from_numpy(np.isin(numbers, members))
                if here.any():
                    part = ScoredPairs(pairs.loss[here], pairs.rewards[here], pairs.weights[here])
                    metrics.append(_validation_metrics(part, logp[here], f"/{name}"))
        return merge_metrics(metrics)

    def _scored(self, actor: Actor, batch: Batch) -> tuple[ScoredPairs, torch.Tensor]:
        """Return the scored pairs of a batch, and the policy's sums [P, 2]."""
        sums = actor.sequence_logp(batch)
        logp = torch.from_numpy(sums.policy.reshape(-1, 2))
        ref_logp = None if sums.reference is None else torch.from_numpy(sums.reference.reshape(-1, 2))
        tokens = torch.from_numpy(batch.trained_tokens.reshape(-1, 2))
        return score_pairs(logp, ref_logp, tokens, self.section), logp


def _validation_metrics(pairs: ScoredPairs, logp: torch.Tensor, suffix: str) -> dict[str, Metric]:
    loss: dict[str, Metric] = {"val/loss": Mean(float(pairs.loss.sum()), len(pairs.loss))}
    found = loss | describe_pairs(pairs, logp, "val/")
    return {f"{name}{suffix}": metric for name, metric in found.items()}
