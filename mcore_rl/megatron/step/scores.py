"""Scores of responses by a value model, in the place of log-probabilities of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.megatron.step.outputs import TokenOutputs


@dataclass(frozen=True)
class ScoreOutputs(TokenOutputs):
    """Scores of a reward model that is trained.

    The only trained position of a response is its scored token (data/supervised/targets.py), so passes, losses and sums
    over a response that are made for log-probabilities apply to scores. Entropies are 0.
    """

    @property
    def quantity(self) -> str:
        return "score"

    def logp(
        self, chunk: torch.nn.Module, hidden: torch.Tensor, batch: MicroBatch, *, compute_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select the scores of the micro-batch's responses, [N]; the second result is 0.

        Shapes: hidden float32 [T], the values of all tokens of the rank's row.
        """
        del chunk, compute_entropy
        scores = hidden.index_select(0, batch.predictors)
        return scores, torch.zeros_like(scores)
