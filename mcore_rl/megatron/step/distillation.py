"""Terms of the objective that come from a teacher: log-probabilities in the advantages, a reverse KL in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from mcore_rl.config.models import TeacherConfig
from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.megatron.step.reverse_kl import (
    linear_logp_at,
    linear_reverse_kl,
    linear_top_k,
    top_k_reverse_kl,
)
from mcore_rl.megatron.step.tiles import Projection
from mcore_rl.types import Mean, Metric


@dataclass(frozen=True)
class TeacherOutputs:
    """Results of the teacher's pass for the trained tokens of this context-parallel rank, on ranks of the last stage.

    They are in host memory, by sample. A field that no term reads is empty.

    logp: log-probabilities of the sampled tokens.
    hidden: hidden states at the predictors, with `weight`, this rank's rows of the teacher's output projection.
    top_ids, top_logp: the most probable tokens; the last column of top_logp is the probability of all other tokens.

    Shapes: logp float32 [n]; hidden [n, h]; top_ids int32 [n, k]; top_logp float32 [n, k + 1]. Units: logp in nats.
    """

    logp: Mapping[int, torch.Tensor] = field(default_factory=dict)
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    top_ids: Mapping[int, torch.Tensor] = field(default_factory=dict)
    top_logp: Mapping[int, torch.Tensor] = field(default_factory=dict)
    weight: torch.Tensor | None = None


@dataclass(frozen=True)
class Distillation:
    """The configured terms of a teacher.

    In the advantage of a sampled token y (policy-gradient form; Lu and Thinking Machines Lab, "On-Policy Distillation",
    2025):

        A <- A + in_advantage * (log q(y) - log p_old(y)),

    without gradient, where q is the teacher and p_old the old policy of the loss. The expected gradient over y ~ p is
    the gradient of KL(p || q) at the token. With `alone`, A is 0 before.

    In the loss: + in_loss * KL(p || q) at every trained token, differentiated through p, over the whole vocabulary or
    the teacher's top_k tokens (reverse_kl.py). Source of the reverse KL as objective: Gu et al., "MiniLLM", arXiv
    2306.08543, here without the gradient through the sampling of later tokens, like Agarwal et al., "GKD", arXiv
    2306.13649. Both distributions have the temperature at which the token was sampled.
    """

    teacher: TeacherConfig

    @property
    def in_advantage(self) -> bool:
        return self.teacher.in_advantage > 0

    @property
    def in_loss(self) -> bool:
        return self.teacher.in_loss > 0

    def advantages(
        self, advantages: torch.Tensor, old_logp: torch.Tensor | None, batch: MicroBatch, outputs: TeacherOutputs
    ) -> torch.Tensor:
        """Add the teacher's term to advantages. Shapes: advantages, old_logp (None without that term) [N] -> [N]."""
        if self.teacher.alone:
            advantages = torch.zeros_like(advantages)
        if not self.in_advantage:
            return advantages
        assert old_logp is not None
        return advantages + self.teacher.in_advantage * (_joined(batch, outputs.logp) - old_logp).detach()

    def loss(
        self,
        hidden: torch.Tensor,
        policy: Projection,
        batch: MicroBatch,
        outputs: TeacherOutputs,
        old_logp: torch.Tensor | None,
    ) -> tuple[torch.Tensor | float, dict[str, Metric]]:
        """Compute the teacher's part of each token's loss, [N] with gradient, or 0 without such a term.

        The metrics are the means over tokens of the reverse KL in the loss and, given old_logp, of
        log p_old(y) - log q(y), which estimates the reverse KL from the sampled tokens.

        Shapes: hidden [N, h], the policy's at the predictors; old_logp [N].
        Collective: the tensor-parallel group.
        """
        metrics: dict[str, Metric] = {}
        if self.in_advantage and old_logp is not None:
            metrics["distillation/kl"] = _mean(old_logp.detach() - _joined(batch, outputs.logp))
        if not self.in_loss:
            return 0.0, metrics
        kl = self.reverse_kl(hidden, policy, batch, outputs)
        return self.teacher.in_loss * kl, metrics | {"distillation/kl_loss": _mean(kl.detach())}

    def reverse_kl(
        self, hidden: torch.Tensor, policy: Projection, batch: MicroBatch, outputs: TeacherOutputs
    ) -> torch.Tensor:
        """Compute the reverse KL at every trained token, [N], with gradient.

        Shapes: hidden [N, h], the policy's at the predictors. Units: nats.
        Collective: the tensor-parallel group.
        """
        if self.teacher.top_k:
            k = self.teacher.top_k
            logp = linear_logp_at(hidden, policy, _joined(batch, outputs.top_ids, k).long())
            return top_k_reverse_kl(logp, _joined(batch, outputs.top_logp, k + 1), self.teacher.rest)
        assert outputs.weight is not None
        # The same options, and so the same tiles.
        teacher = replace(policy, weight=outputs.weight)
        states = _joined(batch, outputs.hidden, outputs.weight.shape[1]).to(outputs.weight)
        return linear_reverse_kl(hidden, policy, states, teacher)

    def top_tokens(self, hidden: torch.Tensor, teacher: Projection) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's most probable tokens in the form of TeacherOutputs."""
        ids, logp = linear_top_k(hidden, teacher, self.teacher.top_k)
        return ids.int(), logp


def _mean(values: torch.Tensor) -> Mean:
    return Mean(float(values.sum(dtype=torch.float64)), len(values))


def _joined(batch: MicroBatch, by_sample: Mapping[int, torch.Tensor], *width: int) -> torch.Tensor:
    """Join the values of a micro-batch's samples on its device, [N, *width]."""
    unknown = [sample for sample in batch.samples if sample not in by_sample]
    if unknown:
        raise McoreRLError(
            f"samples {unknown} have no outputs of the teacher: they must be computed before the updates of a batch"
        )
    parts = [by_sample[sample] for sample in batch.samples] or [torch.empty(0, *width)]  # none in a dummy micro-batch
    return torch.cat(parts).to(batch.tokens.device)
