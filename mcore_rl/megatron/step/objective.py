"""Training objective of a micro-batch: log-probabilities from hidden states, loss and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
import torch.distributed as dist

from mcore_rl.algorithms.interface import Needs
from mcore_rl.algorithms.losses.user import UserLoss
from mcore_rl.algorithms.selection import AllReduce
from mcore_rl.config.rules.teacher import uses_teacher
from mcore_rl.config.schema import Config
from mcore_rl.megatron.model.attention.context import SINGLE_RANK, ContextPart
from mcore_rl.megatron.step.distillation import Distillation
from mcore_rl.megatron.step.loss.rank_batch import RankBatch
from mcore_rl.megatron.step.loss.token_choice import TokenChoice
from mcore_rl.megatron.step.loss.token_loss import TokenLoss
from mcore_rl.megatron.step.loss.trained_tokens import TrainedTokens, select_loss_tokens
from mcore_rl.megatron.step.microbatches import MicroBatch, chosen_samples
from mcore_rl.megatron.step.mismatch import mismatch
from mcore_rl.megatron.step.mtp_loss import mtp_loss
from mcore_rl.megatron.step.outputs import TokenOutputs
from mcore_rl.megatron.step.scores import ScoreOutputs
from mcore_rl.types import Mean, Metric, RankShare, merge_metrics

UpdatePart = tuple[TrainedTokens, torch.Tensor | None, torch.Tensor | None]
"""Tokens of a micro-batch of an update, with their log-probabilities and entropies, [N] each; None: not computed."""


@dataclass(frozen=True)
class MicroBatchReport:
    """Results of one micro-batch on the last stage.

    loss: its part of the sum over all tokens. non_finite: samples with a value that is not finite.
    """

    loss: float
    metrics: dict[str, Metric]
    non_finite: tuple[int, ...]


@dataclass(frozen=True)
class Objective:
    """The configured losses, applied to micro-batches.

    losses: one per entry of AlgorithmConfig.loss_settings. outputs: log-probabilities; losses that use advantages refer
    to the distribution that the engine samples from. stores_logp: keep the log-probabilities before the first update in
    the batch even if no later update needs them. distillation: terms of the teacher; None without one.
    observation_coefficient, mtp_loss_coefficient: of algorithm.observation_coefficient, actor.mtp_loss_coefficient.
    """

    losses: tuple[TokenLoss, ...]
    outputs: TokenOutputs
    stores_logp: bool = False
    distillation: Distillation | None = None
    observation_coefficient: float = 0.0
    mtp_loss_coefficient: float = 0.0

    @classmethod
    def from_config(
        cls, config: Config, group: dist.ProcessGroup | None, context: ContextPart = SINGLE_RANK
    ) -> Objective:
        """Build the configured objective. Raises: ConfigError like configured_losses."""
        rollout, losses = config.rollout, TokenLoss.all_of(config, context)
        # All losses of sources have advantages, so one of them decides for all.
        sampled, scores = losses[0].loss.needs.advantages, losses[0].loss.needs.scores
        outputs = (ScoreOutputs if scores else TokenOutputs)(
            rollout.temperature if sampled else 1.0,
            group,
            config.actor.logprob_chunk_tokens,
            sampled,
            sampled and rollout.keep_sampling_mask,
            config.model.float32_head,
        )
        return cls(
            losses,
            outputs,
            stores_logp=config.observe.token_responses > 0 and sampled,
            distillation=Distillation(config.teacher) if uses_teacher(config.teacher) else None,
            observation_coefficient=config.algorithm.observation_coefficient,
            mtp_loss_coefficient=config.actor.mtp_loss_coefficient,
        )

    @property
    def needs(self) -> Needs:
        """Inputs that one of the losses requires."""
        return reduce(or_, (each.loss.needs for each in self.losses))

    @property
    def needs_old_logp(self) -> bool:
        """True if updates need the log-probabilities of the policy before the first update."""
        return any(each.needs_old_logp for each in self.losses)

    @property
    def chooses_tokens(self) -> bool:
        """True if an update needs the result of `choose_tokens`."""
        return any(each.chooses_tokens for each in self.losses)

    def infers_before_update(self, *, policy_is_old: bool) -> bool:
        """Return True if `choose_tokens` or `group_terms` needs the current log-probabilities."""
        return any(each.infers_before_update(policy_is_old=policy_is_old) for each in self.losses)

    def evaluate(
        self,
        rank_batch: RankBatch,
        chunk: torch.nn.Module,
        batch: MicroBatch,
        hidden: torch.Tensor,
        *,
        policy_is_old: bool,
        choices: Sequence[TokenChoice],
        mtp_weight: float,
    ) -> tuple[torch.Tensor, MicroBatchReport]:
        """Compute the micro-batch's loss, a scalar with gradient: the sum of its token losses times response weights,
        and the loss of observations and of multi-token-prediction layers.

        policy_is_old: the policy is the one before the first update; its log-probabilities are stored in
            rank_batch.old_logp, if later updates need them or stores_logp is set.
        choices: results of `choose_tokens` and `group_terms`, one per loss.
        mtp_weight: 1 / (trained tokens) of the update on all ranks.

        Collective: the tensor-parallel group; also the context-parallel group if a loss needs whole sequences.
        """
        row = len(batch.tokens)
        # With MTP layers the hidden states of their depths follow the policy's (model/output.py).
        own = hidden[:row] if self.mtp_loss_coefficient else hidden
        logp, entropy = self.outputs.logp(chunk, own, batch, compute_entropy=True)
        if policy_is_old and (self.needs_old_logp or self.stores_logp):
            parts = logp.detach().split(list(batch.trained_counts))
            # In place: the later updates of the batch read it.
            rank_batch.old_logp.update(zip(batch.samples, parts, strict=True))
        per_token, metrics = self._token_losses(logp, entropy, batch, rank_batch, choices)
        if self.distillation is not None:
            states = own.index_select(0, batch.predictors)
            old = self.losses[0].old_logp(logp, batch, rank_batch) if policy_is_old else None
            terms = self.distillation.loss(
                states, self.outputs.projection(chunk, batch), batch, rank_batch.teacher, old
            )
            per_token, metrics = per_token + terms[0], metrics | terms[1]
        weighted = per_token * batch.loss_weights
        loss = weighted.sum()
        with torch.no_grad():
            if policy_is_old and self.needs.advantages:
                metrics |= mismatch(batch, logp)
            report = _report(batch, loss, metrics, logp, weighted, entropy)
            if self.needs.scores:
                report.metrics.pop("actor/entropy")
        if batch.observations is not None:
            added, of_observations = self.outputs.observation_loss(chunk, own, batch.observations)
            loss = loss + self.observation_coefficient * added
            report = replace(report, metrics=report.metrics | of_observations)
        if not self.mtp_loss_coefficient:
            return loss, report
        ahead, of_mtp = mtp_loss(chunk, hidden[row:], batch, self.outputs, self.mtp_loss_coefficient * mtp_weight)
        return loss + ahead, replace(report, metrics=report.metrics | of_mtp)

    def _token_losses(
        self,
        logp: torch.Tensor,
        entropy: torch.Tensor,
        batch: MicroBatch,
        rank_batch: RankBatch,
        choices: Sequence[TokenChoice],
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Compute the loss of each token by the loss of its source, [N], and metrics. Each loss gets its own tokens
        only, and losses without samples in the micro-batch are not computed.

        Metrics of a source with its own loss are returned a second time with its name as the last part. With a user's
        loss, they have these names only: its metrics are means, and another loss may use a name for another kind.
        """
        joins = not any(isinstance(each.loss, UserLoss) for each in self.losses)
        # A dummy micro-batch has no samples; the first loss keeps it in the graph.
        parts, metrics = [], []
        for number in sorted(set(batch.losses)) or [0]:
            part, tokens = select_loss_tokens(batch, number)
            loss, values = self.losses[number], (logp, entropy)
            own_logp, own_entropy = values if tokens is None else (each[tokens] for each in values)
            found, measured = loss.evaluate(own_logp, own_entropy, part, rank_batch, choices[number])
            # index_add keeps the gradient; tokens of other losses get 0.
            parts.append(found if tokens is None else found.new_zeros(len(logp)).index_add(0, tokens, found))
            named = {} if loss.source is None else {f"{name}/{loss.source}": each for name, each in measured.items()}
            metrics.append(measured | named if joins or loss.source is None else named)
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0], merge_metrics(metrics)

    def choose(
        self,
        parts: Sequence[UpdatePart],
        rank_batch: RankBatch,
        share: RankShare,
        *,
        seed: int,
        num_samples: int,
        all_reduce: AllReduce,
    ) -> list[TokenChoice]:
        """Compute what each loss needs from all its responses of an update, before the backward passes.

        parts: this rank's micro-batches with the current log-probabilities and entropies; None: no loss needs them.
        seed, num_samples: see TokenLoss.choose_tokens, TokenLoss.group_terms.

        Collective: the ranks that all_reduce sums over, each with its own tokens.
        """
        found = []
        for number, loss in enumerate(self.losses):
            own, choice = [_select_loss(part, number) for part in parts], TokenChoice()
            if loss.chooses_tokens:
                known = [(batch, a, b) for batch, a, b in own if a is not None and b is not None]
                choice = loss.choose_tokens(known, rank_batch, seed=seed, all_reduce=all_reduce)
            if loss.loss.needs.whole_group:
                mine = share if share.losses is None else chosen_samples(share, share.losses == number)
                passed = [(batch, logp) for batch, logp, _ in own]
                groups = loss.group_terms(passed, rank_batch, mine, num_samples, all_reduce=all_reduce)
                choice = replace(choice, groups=groups)
            found.append(choice)
        return found


def _select_loss(part: UpdatePart, number: int) -> UpdatePart:
    """Select the tokens of one loss."""
    batch, *values = part
    own, tokens = select_loss_tokens(batch, number)
    logp, entropy = (each if each is None or tokens is None else each[tokens] for each in values)
    return own, logp, entropy


def _report(
    batch: MicroBatch,
    loss: torch.Tensor,
    metrics: dict[str, Metric],
    logp: torch.Tensor,
    weighted: torch.Tensor,
    entropy: torch.Tensor,
) -> MicroBatchReport:
    """Report the loss, the metrics with the entropy, and the samples with values that are not finite. Shapes: logp,
    weighted losses and entropy [N]."""
    # If an input is not finite, one of these is not either; non_finite_samples then finds the tokens.
    suspects = torch.stack((logp, weighted, entropy))
    # One device-to-host transfer instead of one per number.
    sums = [loss, entropy.sum(dtype=torch.float64), torch.isfinite(suspects).all()]
    loss_sum, entropy_sum, finite = torch.stack([each.double() for each in sums]).tolist()
    return MicroBatchReport(
        loss=loss_sum,
        metrics={"actor/entropy": Mean(entropy_sum, len(batch.targets)), **metrics},
        non_finite=() if finite else non_finite_samples(batch, suspects),
    )


def non_finite_samples(batch: MicroBatch, values: torch.Tensor | None) -> tuple[int, ...]:
    """Return the samples with a token for which any of `values` [..., N] is not finite."""
    if values is None or bool(torch.isfinite(values).all()):
        return ()
    bad = ~torch.isfinite(values).reshape(-1, values.shape[-1]).all(0)
    parts = bad.split(list(batch.trained_counts))
    return tuple(sample for sample, part in zip(batch.samples, parts, strict=True) if bool(part.any()))
