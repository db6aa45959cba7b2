"""Training on pairs of a chosen and a rejected response: DPO, and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from mcore_rl.algorithms.preference import ScoredPairs, compare_scores, describe_pairs, score_pairs
from mcore_rl.config.objectives import PreferenceConfig
from mcore_rl.ports import Actor
from mcore_rl.trainer.supervised import TextData
from mcore_rl.types import Batch, Mean, Metric, merge_metrics

LOSS = "actor/loss"


@dataclass(frozen=True)
class PairBatch:
    """Batch in which responses 2 i and 2 i + 1 are the chosen and the rejected response of pair i, with the margins of
    the pairs. Shapes: margins float64 [P]."""

    batch: Batch
    margins: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PairObjective(TextData[PairBatch]):
    """Training on pairs; implements TextObjective. A step has one update, with the weights of its pairs.

    trains_scores: the actor is a reward model, whose scores are compared; otherwise it is a policy (DPO).
    """

    section: PreferenceConfig
    trains_scores: bool = False

    def train(self, actor: Actor, step: int) -> dict[str, Metric]:
        """Run one update on the next batch.

        Raises: NonFiniteError before the optimizer step with a non-finite log-probability, score, loss or gradient.
        """
        batch = self.next_batch(step)
        pairs = self._scored(actor, batch)
        weighted = replace(batch.batch, advantages=pairs.weights.reshape(-1).numpy().astype(np.float32))
        updated = actor.update(actor.recompute_logp(weighted))
        # The ranks sum weights times log-probabilities or scores, which has the loss's gradient but another value.
        loss: dict[str, Metric] = {LOSS: Mean(float(pairs.loss.sum()), len(pairs.loss))}
        return updated | loss | describe_pairs(pairs, "preference/")

    def validate(self, actor: Actor) -> dict[str, Metric]:
        """Compute loss, accuracy and margin of the validation pairs; `val/<metric>/<part>` for each part."""
        assert self.validation is not None
        metrics: list[Mapping[str, Metric]] = []
        first = 0
        for batch in self.validation():
            pairs = self._scored(actor, batch)
            numbers = np.arange(first, first + len(pairs.loss))
            first += len(numbers)
            metrics.append(_validation_metrics(pairs, ""))
            for name, members in self.parts.items():
                here = torch.from_numpy(np.isin(numbers, members))
                if here.any():
                    metrics.append(_validation_metrics(pairs[here], f"/{name}"))
        return merge_metrics(metrics)

    def _scored(self, actor: Actor, pairs: PairBatch) -> ScoredPairs:
        sums = actor.sequence_logp(pairs.batch)
        policy = torch.from_numpy(sums.policy.reshape(-1, 2))
        if self.trains_scores:
            return compare_scores(policy, torch.from_numpy(pairs.margins), self.section)
        reference = None if sums.reference is None else torch.from_numpy(sums.reference.reshape(-1, 2))
        tokens = torch.from_numpy(pairs.batch.trained_tokens.reshape(-1, 2))
        return score_pairs(policy, reference, tokens, self.section)


def _validation_metrics(pairs: ScoredPairs, suffix: str) -> dict[str, Metric]:
    loss: dict[str, Metric] = {"val/loss": Mean(float(pairs.loss.sum()), len(pairs.loss))}
    found = loss | describe_pairs(pairs, "val/")
    return {f"{name}{suffix}": metric for name, metric in found.items()}
