"""Quantities of the trained tokens that are computed from hidden states by the output projection, without logits of the
whole row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.model.output import output_weight, unwrap
from mcore_rl.megatron.step.kept_tokens import KeptTokens
from mcore_rl.megatron.step.logprobs import linear_logp_entropy
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.megatron.step.observations import Observations
from mcore_rl.megatron.step.score_norms import linear_score_norms
from mcore_rl.megatron.step.tiles import Projection
from mcore_rl.types import Mean, Metric


@dataclass(frozen=True)
class TokenOutputs:
    """Log-probabilities and other quantities of the trained tokens of a micro-batch.

    group: tensor-parallel group; None for a single rank. chunk_tokens: tokens whose logits exist at the same time.

    sampled: the distribution is the one that the engine samples from. Log-probabilities and entropies use the
    temperature at which each token was sampled, which is `temperature` unless the batch has another one. With `masked`,
    they cover the set of tokens that each token was sampled from. Otherwise the distribution is the model's own, at
    `temperature`.

    float32_head: model.float32_head, for policy, reference, teacher and multi-token prediction.
    """

    temperature: float
    group: dist.ProcessGroup | None
    chunk_tokens: int
    sampled: bool = True
    masked: bool = False
    float32_head: bool = False

    @property
    def quantity(self) -> str:
        """Name of the values of `logp`, for errors."""
        return "log-probability"

    def logp(
        self, chunk: torch.nn.Module, hidden: torch.Tensor, batch: MicroBatch, *, compute_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probabilities and entropies of the trained tokens, [N] each.

        Shapes: hidden [T, h], all tokens of the rank's row. Units: nats.
        Collective: the tensor-parallel group.
        """
        return linear_logp_entropy(
            hidden.index_select(0, batch.predictors),
            output_weight(chunk),
            batch.targets,
            temperature=self._temperature(batch),
            chunk_tokens=self.chunk_tokens,
            group=self.group,
            compute_entropy=compute_entropy,
            vocab_size=unwrap(chunk).unpadded_vocab_size,
            kept=self._kept(batch),
            float32_head=self.float32_head,
        )

    def logp_of(
        self, chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor
    ) -> tuple[MicroBatch, torch.Tensor]:
        """Compute log-probabilities only, for RankModel.infer. Returns them with their micro-batch."""
        return batch, self.logp(chunk, hidden, batch, compute_entropy=False)[0]

    def logp_and_entropy_of(
        self, chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor
    ) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
        """Compute log-probabilities and entropies, for RankModel.infer. Returns them with their micro-batch."""
        return batch, *self.logp(chunk, hidden, batch, compute_entropy=True)

    def score_norms_of(
        self, chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor
    ) -> tuple[MicroBatch, torch.Tensor]:
        """Compute the squared norms of the scores of the trained tokens, [N], for RankModel.infer. Returns them with
        their micro-batch."""
        hidden = hidden.index_select(0, batch.predictors)
        return batch, linear_score_norms(hidden, self.projection(chunk, batch), batch.targets)

    def observation_loss(
        self, chunk: torch.nn.Module, hidden: torch.Tensor, observed: Observations
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Compute the weighted sum over responses of the mean cross-entropy of their observations (formula in
        algorithms/terms.py), a scalar with gradient, and the mean over observations with a weight.

        Shapes: hidden [T, h], all tokens of the rank's row. Units: nats.
        Collective: the tensor-parallel group.
        """
        logp, _ = linear_logp_entropy(
            hidden.index_select(0, observed.predictors),
            output_weight(chunk),
            observed.targets,
            chunk_tokens=self.chunk_tokens,
            group=self.group,
            compute_entropy=False,
            vocab_size=unwrap(chunk).unpadded_vocab_size,
            float32_head=self.float32_head,
        )
        counted = observed.weights > 0
        sums = [-(logp.detach() * counted).sum(dtype=torch.float64), counted.sum().double()]
        return -(logp * observed.weights).sum(), {"actor/observation_loss": Mean(*torch.stack(sums).tolist())}

    def projection(self, chunk: torch.nn.Module, batch: MicroBatch) -> Projection:
        """Return the output projection of a model for the trained tokens of a micro-batch."""
        return Projection(
            output_weight(chunk),
            self._temperature(batch),
            self.chunk_tokens,
            self.group,
            unwrap(chunk).unpadded_vocab_size,
            self.float32_head,
        )

    def _kept(self, batch: MicroBatch) -> KeptTokens | None:
        """Return the sets that the softmax covers. Raises: McoreRLError if they are needed but not recorded."""
        if not self.masked:
            return None
        if batch.kept is None and len(batch.targets):
            raise McoreRLError(
                f"rollout.keep_sampling_mask=true, but samples {list(batch.samples[:10])} have no record of the sets "
                "that their tokens were sampled from"
            )
        return batch.kept

    def _temperature(self, batch: MicroBatch) -> torch.Tensor | float:
        """Return the temperature of all trained tokens, a number or [N]."""
        given = batch.temperatures
        if given is None or not self.sampled:
            return self.temperature
        if isinstance(given, torch.Tensor):
            return torch.where(given.isnan(), self.temperature, given)
        # Recorded temperatures are float32; the configured one is float64.
        return self.temperature if given == np.float32(self.temperature) else given
