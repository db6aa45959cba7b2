"""Terms of the objective that come from a teacher: log-probabilities in the advantages, a reverse KL in the loss.

    A <- A + in_advantage sg[log q(y) - log p_old(y)]      y: the sampled token; alone: A = 0 before
    loss of the token + in_loss KL(p || q)                 p: the policy, with gradient; q: the teacher
        top_k = 0      KL = sum_v p(v) (log p(v) - log q(v))             v: the vocabulary
        top_k = K      the sum over the K most probable tokens of q, and all other tokens as one outcome
                       rest=renormalize: over the K tokens alone, p and q divided by their sums over them

p_old is the old policy of the loss. p and q have the temperature at which the token was sampled. The first term is
added after the estimator and its whitening.

Source: on-policy distillation, arXiv 2306.13649 and 2306.08543 (the reverse KL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mcore_rl.config.models import TeacherConfig
from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.step.loss.trained_tokens import TrainedTokens
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
    hidden: hidden states at the predictors, with `weights`, this rank's rows of the output projection of each teacher,
        by its number, and `teachers`, the number of each sample's teacher.
    top_ids, top_logp: the most probable tokens; the last column of top_logp is the probability of all other tokens.
    untaught: samples of the batch without a teacher (teacher.by_source). They have no term.
    hinted: samples with a hint; None: hints were not read (data.hint_key).

    Shapes: logp float32 [n]; hidden [n, h]; top_ids int32 [n, k]; top_logp float32 [n, k + 1]. Units: logp in nats.
    """

    logp: Mapping[int, torch.Tensor] = field(default_factory=dict)
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    top_ids: Mapping[int, torch.Tensor] = field(default_factory=dict)
    top_logp: Mapping[int, torch.Tensor] = field(default_factory=dict)
    weights: Mapping[int, torch.Tensor] = field(default_factory=dict)
    teachers: Mapping[int, int] = field(default_factory=dict)
    untaught: frozenset[int] = frozenset()
    hinted: frozenset[int] | None = None

    @classmethod
    def joined(
        cls, parts: Sequence[TeacherOutputs], untaught: frozenset[int], hinted: frozenset[int] | None = None
    ) -> TeacherOutputs:
        """Join the outputs of teachers of different samples."""
        names = ("logp", "hidden", "top_ids", "top_logp", "weights", "teachers")
        merged = {name: {key: value for part in parts for key, value in getattr(part, name).items()} for name in names}
        return cls(**merged, untaught=untaught, hinted=hinted)

    def describe(self, batch: TrainedTokens) -> dict[str, Metric]:
        """Return the fraction of tokens scored after a hint, of the tokens with a teacher; {} without hints."""
        if self.hinted is None:
            return {}
        counts = [
            (sample, count)
            for sample, count in zip(batch.samples, batch.trained_counts, strict=True)
            if sample not in self.untaught
        ]
        after = sum(count for sample, count in counts if sample in self.hinted)
        return {"distillation/hinted_fraction": Mean(float(after), sum(count for _, count in counts))}

    def tokens(self, batch: TrainedTokens, teacher: int | None = None) -> torch.Tensor | None:
        """Return the indices of a micro-batch's trained tokens that have a teacher, or the teacher of this number:
        int64 on its device, None for all tokens."""
        chosen = [self._has(sample, teacher) for sample in batch.samples]
        if all(chosen):
            return None
        counts = torch.tensor(batch.trained_counts, dtype=torch.int64)
        return torch.tensor(chosen).repeat_interleave(counts).nonzero().squeeze(1).to(batch.targets.device)

    def of(self, name: str, batch: TrainedTokens, *width: int, teacher: int | None = None) -> torch.Tensor:
        """Join a field for the tokens of `tokens` on their device, [M, *width]."""
        by_sample: Mapping[int, torch.Tensor] = getattr(self, name)
        counts = zip(batch.samples, batch.trained_counts, strict=True)
        samples = [sample for sample, count in counts if count and self._has(sample, teacher)]
        unknown = [sample for sample in samples if sample not in by_sample]
        if unknown:
            raise McoreRLError(
                f"samples {unknown} have no outputs of the teacher: they must be computed before the updates of a batch"
            )
        parts = [by_sample[sample] for sample in samples] or [torch.empty(0, *width)]  # none in a dummy micro-batch
        return torch.cat(parts).to(batch.targets.device)

    def _has(self, sample: int, teacher: int | None) -> bool:
        if teacher is None:
            return sample not in self.untaught
        return self.teachers.get(sample) == teacher


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
        self, advantages: torch.Tensor, old_logp: torch.Tensor | None, batch: TrainedTokens, outputs: TeacherOutputs
    ) -> torch.Tensor:
        """Add the teacher's term to advantages. Shapes: advantages, old_logp (None without that term) [N] -> [N]."""
        if self.teacher.alone:
            advantages = torch.zeros_like(advantages)
        if not self.in_advantage:
            return advantages
        assert old_logp is not None
        taught = outputs.tokens(batch)
        term = outputs.of("logp", batch) - _rows(old_logp, taught)
        return advantages + _spread(self.teacher.in_advantage * term.detach(), taught, len(advantages))

    def loss(
        self,
        hidden: torch.Tensor,
        policy: Projection,
        batch: TrainedTokens,
        outputs: TeacherOutputs,
        old_logp: torch.Tensor | None,
    ) -> tuple[torch.Tensor | float, dict[str, Metric]]:
        """Compute the teacher's part of each token's loss, [N] with gradient, or 0 without such a term.

        The metrics are the means over tokens with a teacher of the reverse KL in the loss and, given old_logp, of
        log p_old(y) - log q(y), which estimates the reverse KL from the sampled tokens; with teacher.by_source also the
        fraction of tokens without a teacher.

        Shapes: hidden [N, h], the policy's at the predictors; old_logp [N].
        Collective: the tensor-parallel group.
        """
        metrics = outputs.describe(batch)
        taught, total = outputs.tokens(batch), len(batch.targets)
        if self.teacher.by_source:
            known = total if taught is None else len(taught)
            metrics["distillation/untaught_fraction"] = Mean(float(total - known), total)
        if self.in_advantage and old_logp is not None:
            metrics["distillation/kl"] = _mean(_rows(old_logp.detach(), taught) - outputs.of("logp", batch))
        if not self.in_loss:
            return 0.0, metrics
        kl = self.reverse_kl(hidden, policy, batch, outputs)
        return self.teacher.in_loss * kl, metrics | {"distillation/kl_loss": _mean(_rows(kl.detach(), taught))}

    def reverse_kl(
        self, hidden: torch.Tensor, policy: Projection, batch: TrainedTokens, outputs: TeacherOutputs
    ) -> torch.Tensor:
        """Compute the reverse KL at every trained token, [N], with gradient; 0 for tokens without a teacher.

        Shapes: hidden [N, h], the policy's at the predictors. Units: nats.
        Collective: the tensor-parallel group.
        """
        if self.teacher.top_k:
            k, taught = self.teacher.top_k, outputs.tokens(batch)
            ids = outputs.of("top_ids", batch, k).long()
            logp = linear_logp_at(_rows(hidden, taught), policy.of_tokens(taught), ids)
            kl = top_k_reverse_kl(logp, outputs.of("top_logp", batch, k + 1), self.teacher.rest)
            return _spread(kl, taught, len(hidden))
        parts = []
        # Tensor-parallel ranks have the same samples, so they call the same teachers. Their tokens are disjoint.
        for number, weight in outputs.weights.items():
            own = outputs.tokens(batch, number)
            mine = policy.of_tokens(own)
            # The same options, and so the same tiles.
            states = outputs.of("hidden", batch, weight.shape[1], teacher=number).to(weight)
            kl = linear_reverse_kl(_rows(hidden, own), mine, states, replace(mine, weight=weight))
            parts.append(_spread(kl, own, len(hidden)))
        # Without parts, no response of the batch has a teacher.
        return torch.stack(parts).sum(0) if parts else hidden.new_zeros(len(hidden), dtype=torch.float32)

    def top_tokens(self, hidden: torch.Tensor, teacher: Projection) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's most probable tokens in the form of TeacherOutputs."""
        ids, logp = linear_top_k(hidden, teacher, self.teacher.top_k)
        return ids.int(), logp


def _mean(values: torch.Tensor) -> Mean:
    return Mean(float(values.sum(dtype=torch.float64)), len(values))


def _rows(values: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Select tokens (None: all)."""
    return values if tokens is None else values[tokens]


def _spread(values: torch.Tensor, tokens: torch.Tensor | None, total: int) -> torch.Tensor:
    """Invert `_rows`; other tokens get 0."""
    return values if tokens is None else values.new_zeros(total).index_add(0, tokens, values)
