"""Training objective of a micro-batch: log-probabilities from hidden states, loss and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.algorithms import Correction, PolicyLossInputs, PolicyLossResult
from mcore_rl.algorithms.corrections import corrected
from mcore_rl.algorithms.group_scores import WholeGroupLoss, group_terms
from mcore_rl.algorithms.interface import PolicyLoss
from mcore_rl.algorithms.passes import chooses_tokens, needs_old_logp, passes_before_update
from mcore_rl.algorithms.registry import configured_corrections, configured_loss
from mcore_rl.algorithms.selection import AllReduce, SelectiveLoss, choose, highest, mean_bound, token_keys
from mcore_rl.algorithms.terms import add_terms
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.rules.teacher import uses_teacher
from mcore_rl.config.schema import Config
from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.model.attention.context import SINGLE_RANK, ContextPart
from mcore_rl.megatron.step.distillation import Distillation, TeacherOutputs
from mcore_rl.megatron.step.microbatches import MicroBatch, by_sample, own_tokens, samples_and_positions
from mcore_rl.megatron.step.mismatch import mismatch
from mcore_rl.megatron.step.mtp_loss import mtp_loss
from mcore_rl.megatron.step.outputs import TokenOutputs
from mcore_rl.megatron.step.scores import ScoreOutputs
from mcore_rl.megatron.step.token_choice import TokenChoice, joined_flags, joined_terms
from mcore_rl.types import Mean, Metric, RankShare, TrajectoryBuffers


@dataclass(frozen=True)
class RankBatch:
    """The policy's batch: this rank's shares, one per update, their trajectories, and per-token results.

    Each forward pass returns a new RankBatch with its results added; a rank has no other state about the current batch.
    Results are by sample, on the ranks of the last stage:

    old_logp: log-probabilities of the policy before the first update. The first update adds the entries of its samples.
    ref_logp: log-probabilities of the reference.
    teacher: outputs of the teacher's pass.
    penalties: KL penalties, to be subtracted from the rewards.
    token_advantages: advantages per token.

    entropy_coefficient: coefficient of the entropy bonus; None: the configured one.
    replays: whether the later updates use the experts that the policy chose before the first update.

    Shapes: old_logp, ref_logp [n], the trained tokens of this context-parallel rank; penalties, token_advantages
    float32 [n], all trained tokens. Units: logp in nats.
    """

    shares: Sequence[RankShare]
    chunks: Sequence[TrajectoryBuffers]
    old_logp: dict[int, torch.Tensor] = field(default_factory=dict)
    ref_logp: Mapping[int, torch.Tensor] = field(default_factory=dict)
    teacher: TeacherOutputs = field(default_factory=TeacherOutputs)
    penalties: Mapping[int, np.ndarray] = field(default_factory=dict)
    token_advantages: Mapping[int, np.ndarray] = field(default_factory=dict)
    entropy_coefficient: float | None = None
    replays: bool = False


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
    """The configured loss, applied to micro-batches.

    corrections: corrections of the mismatch between engine and trainer. outputs: log-probabilities; a loss that uses
    advantages refers to the distribution that the engine samples from. context: the rank's part of every row; it
    reports metrics of its own tokens only. stores_logp: keep the log-probabilities before the first update in the batch
    even if no later update needs them. distillation: terms of the teacher; None without one.
    """

    algorithm: AlgorithmConfig
    loss: PolicyLoss
    corrections: tuple[Correction, ...]
    outputs: TokenOutputs
    context: ContextPart = SINGLE_RANK
    stores_logp: bool = False
    distillation: Distillation | None = None
    mtp_loss_coefficient: float = 0.0

    @classmethod
    def from_config(
        cls, config: Config, group: dist.ProcessGroup | None, context: ContextPart = SINGLE_RANK
    ) -> Objective:
        """Build the configured objective. Raises: ConfigError like configured_loss."""
        algorithm, rollout = config.algorithm, config.rollout
        loss = configured_loss(algorithm)
        sampled = loss.needs.advantages
        outputs = (ScoreOutputs if loss.needs.scores else TokenOutputs)(
            rollout.temperature if sampled else 1.0,
            group,
            config.actor.logprob_chunk_tokens,
            sampled,
            sampled and rollout.keep_sampling_mask,
            config.model.float32_head,
        )
        return cls(
            algorithm,
            loss,
            configured_corrections(config, loss),
            outputs,
            context,
            stores_logp=config.observe.token_responses > 0 and sampled,
            distillation=Distillation(config.teacher) if uses_teacher(config.teacher) else None,
            mtp_loss_coefficient=config.actor.mtp_loss_coefficient,
        )

    @property
    def needs_old_logp(self) -> bool:
        """True if updates need the log-probabilities of the policy before the first update."""
        distils = self.distillation is not None and self.distillation.in_advantage
        return needs_old_logp(self.algorithm, self.loss, self.corrections, distils=distils)

    @property
    def chooses_tokens(self) -> bool:
        """True if an update needs the result of `choose_tokens`."""
        return chooses_tokens(self.algorithm, self.loss, self.corrections)

    def infers_before_update(self, *, policy_is_old: bool) -> bool:
        """Return True if `choose_tokens` or `group_terms` needs the current log-probabilities."""
        has_teacher = self.distillation is not None
        return passes_before_update(
            self.algorithm, self.loss, self.corrections, is_first=policy_is_old, has_teacher=has_teacher
        )

    def evaluate(
        self,
        rank_batch: RankBatch,
        chunk: torch.nn.Module,
        batch: MicroBatch,
        hidden: torch.Tensor,
        *,
        policy_is_old: bool,
        choice: TokenChoice,
        mtp_weight: float,
        response_weight: float = 0.0,
    ) -> tuple[torch.Tensor, MicroBatchReport]:
        """Compute the micro-batch's loss, a scalar with gradient: the sum of its token losses times response weights,
        and the loss of multi-token-prediction layers.

        policy_is_old: the policy is the one before the first update; its log-probabilities are stored in
            rank_batch.old_logp, if later updates need them or stores_logp is set.
        choice: result of `choose_tokens`.
        mtp_weight: 1 / (trained tokens) of the update on all ranks.
        response_weight: 1 / (trained responses) of the update on all ranks.

        Collective: the tensor-parallel group; also the context-parallel group if the loss needs whole sequences.
        """
        row = len(batch.tokens)
        # With MTP layers the hidden states of their depths follow the policy's (model/output.py).
        own = hidden[:row] if self.mtp_loss_coefficient else hidden
        logp, entropy = self.outputs.logp(chunk, own, batch, compute_entropy=True)
        if policy_is_old and (self.needs_old_logp or self.stores_logp):
            parts = logp.detach().split(list(batch.trained_counts))
            # In place: the later updates of the batch read it.
            rank_batch.old_logp.update(zip(batch.samples, parts, strict=True))
        inputs = self._inputs(logp, batch, rank_batch)
        per_token, metrics = self._policy_loss(inputs, batch, choice)
        has_kl, bonus = self.algorithm.kl.in_loss > 0, rank_batch.entropy_coefficient
        per_token, of_terms = add_terms(
            per_token,
            self.algorithm,
            inputs,
            entropy=entropy,
            entropy_coefficient=self.algorithm.entropy_coefficient if bonus is None else bonus,
            ref_logp=_stored_logp(batch, rank_batch.ref_logp, logp, "reference") if has_kl else None,
        )
        if self.distillation is not None:
            states, old = own.index_select(0, batch.predictors), inputs.old_logp if policy_is_old else None
            terms = self.distillation.loss(
                states, self.outputs.projection(chunk, batch), batch, rank_batch.teacher, old
            )
            per_token, of_terms = per_token + terms[0], of_terms | terms[1]
        weighted = per_token * batch.loss_weights
        loss = weighted.sum()
        metrics |= of_terms
        with torch.no_grad():
            if policy_is_old and self.loss.needs.advantages:
                metrics |= mismatch(batch, logp)
            report = _report(batch, loss, metrics, logp, weighted, entropy)
            if self.loss.needs.scores:
                report.metrics.pop("actor/entropy")
        if batch.observations is not None:
            weight = self.algorithm.observation_coefficient * response_weight
            added, of_observations = self.outputs.observation_loss(chunk, own, batch.observations)
            loss, report = loss + weight * added, replace(report, metrics=report.metrics | of_observations)
        if not self.mtp_loss_coefficient:
            return loss, report
        ahead, of_mtp = mtp_loss(chunk, hidden[row:], batch, self.outputs, self.mtp_loss_coefficient * mtp_weight)
        return loss + ahead, replace(report, metrics=report.metrics | of_mtp)

    def _policy_loss(
        self, inputs: PolicyLossInputs, batch: MicroBatch, choice: TokenChoice
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Compute the loss of each token, [N], without the terms that are added to it, and its metrics."""
        if choice.of_loss is not None:
            inputs = replace(inputs, chosen=joined_flags(batch, choice.of_loss))
        if choice.within is not None:
            inputs = replace(inputs, within=joined_flags(batch, choice.within))
        if choice.groups is not None:
            group_loss, slope = joined_terms(batch, choice.groups)
            inputs = replace(inputs, group_loss=group_loss, slope=slope)
        result = self._per_token(inputs, batch)
        per_token, metrics = result.loss, dict(result.metrics)
        if choice.kept is not None:
            kept = joined_flags(batch, choice.kept)
            per_token = per_token.masked_fill(~kept, 0.0)
            weights = int(batch.loss_weights.count_nonzero())
            metrics["high_entropy_fraction"] = Mean(float(kept.count_nonzero()), weights)
        return per_token, {name if "/" in name else f"actor/{name}": metric for name, metric in metrics.items()}

    def choose_tokens(
        self,
        parts: Sequence[tuple[MicroBatch, torch.Tensor, torch.Tensor]],
        rank_batch: RankBatch,
        *,
        seed: int,
        all_reduce: AllReduce,
    ) -> TokenChoice:
        """Choose tokens among all trained tokens of an update. Tokens with a loss weight of 0, for example of filtered
        responses, are not among them.

        parts: this rank's micro-batches with the current log-probabilities, used instead of missing old ones, and
            entropies.

        Collective: the ranks that all_reduce sums over, each with its own tokens.
        """
        batches, logp, entropies = zip(*parts, strict=True)

        def flags(choices: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
            return by_sample(zip(batches, choices, strict=True))

        of_loss, within, kept = None, None, None
        current = by_sample(zip(batches, logp, strict=True))
        known = replace(rank_batch, old_logp=current | rank_batch.old_logp)
        trained = [batch.loss_weights != 0 for batch in batches]
        inputs = [
            replace(self._inputs(values, batch, known), mask=selected.to(values.dtype))
            for (batch, values, _), selected in zip(parts, trained, strict=True)
        ]
        for correction in (each for each in self.corrections if each.chooses_tokens):
            squares = [correction.second_moments(part) for part in inputs]
            limit = mean_bound(torch.cat(squares)[torch.cat(trained)], correction.config.bounds[1], all_reduce)
            within = flags([squared <= limit for squared in squares])
        if self.loss.needs.selection:
            keys = [token_keys(*samples_and_positions(batch, self.context), seed) for batch in batches]
            of_loss = flags(choose(cast(SelectiveLoss, self.loss), inputs, keys, all_reduce))
        if self.algorithm.high_entropy_share < 1:
            of_trained = [each.masked_fill(~own, -torch.inf) for each, own in zip(entropies, trained, strict=True)]
            kept = flags(highest(of_trained, self.algorithm.high_entropy_share, all_reduce))
        return TokenChoice(of_loss, within, kept)

    def group_terms(
        self,
        parts: Sequence[tuple[MicroBatch, torch.Tensor | None]],
        rank_batch: RankBatch,
        share: RankShare,
        num_samples: int,
        *,
        all_reduce: AllReduce,
    ) -> dict[int, tuple[float, float]]:
        """Compute the terms of a loss with needs.whole_group for the samples of the update's share.

        parts: this rank's micro-batches with the current log-probabilities; None: the old policy's, which are not
        known yet. num_samples: larger than any sample, the same on all ranks. Tokens with a loss weight of 0 do not
        count.

        Collective: the ranks that all_reduce sums over, each with its own tokens.
        """
        tokens = []
        for batch, logp in parts:
            current = torch.zeros_like(batch.logp_rollout) if logp is None else logp
            known = by_sample([(batch, current)])
            old_logp = known if logp is None else known | rank_batch.old_logp
            inputs = self._inputs(current, batch, replace(rank_batch, old_logp=old_logp))
            assert inputs.old_logp is not None
            assert inputs.advantages is not None
            trained = batch.loss_weights != 0
            samples, _ = samples_and_positions(batch, self.context)
            log_ratio = current - inputs.old_logp
            tokens.append((samples[trained], log_ratio[trained], inputs.advantages[trained]))
        assert share.groups is not None
        groups = dict(zip(share.samples.tolist(), share.groups.tolist(), strict=True))
        device = parts[0][0].tokens.device
        loss = cast(WholeGroupLoss, self.loss)
        return group_terms(loss, tokens, groups, num_samples, device=device, all_reduce=all_reduce)

    def _inputs(self, logp: torch.Tensor, batch: MicroBatch, rank_batch: RankBatch) -> PolicyLossInputs:
        advantages, old_logp = rank_batch.token_advantages, rank_batch.old_logp
        old = batch.logp_rollout if self.algorithm.old_logp == "rollout" else None
        if self.needs_old_logp:
            old = _stored_logp(batch, old_logp, logp, "old")
        of_tokens = own_tokens(batch, advantages, self.context, "advantages") if advantages else batch.advantages
        if self.distillation is not None:
            of_tokens = self.distillation.advantages(of_tokens, old, batch, rank_batch.teacher)
        return PolicyLossInputs(
            logp=logp,
            mask=torch.ones_like(logp),
            old_logp=old,
            advantages=of_tokens,
            rollout_logp=batch.logp_rollout,
            staleness=batch.staleness if self.loss.needs.staleness else None,
        )

    def _per_token(self, inputs: PolicyLossInputs, batch: MicroBatch) -> PolicyLossResult:
        corrects_whole = any(correction.needs_whole_sequence for correction in self.corrections)
        if not (self.loss.needs.whole_sequence or corrects_whole):
            return corrected(self.loss, self.corrections, inputs)
        return self._on_whole_responses({n: value for n, value in vars(inputs).items() if value is not None}, batch)

    def _on_whole_responses(self, given: dict[str, torch.Tensor], batch: MicroBatch) -> PolicyLossResult:
        """Compute a loss or correction that needs all tokens of a response; returns the loss of the rank's tokens, [N].

        given: fields of PolicyLossInputs, [N] each.

        Metrics cover whole responses, so only the first context-parallel rank reports them.
        """
        if self.context.size > 1 and len(batch.owners):
            stacked = torch.stack([value.to(given["logp"]) for value in given.values()])
            given = dict(zip(given, self.context.gather(stacked, batch.owners), strict=True))
            # One collective for all tensors, so the flags were sent as numbers.
            given |= {name: given[name] > 0 for name in ("chosen", "within") if name in given}
        # Without trained tokens, for example in a dummy micro-batch: one row without tokens.
        counts = list(batch.whole_counts) if len(batch.owners) else [0]
        rows = {name: pad_sequence(list(flat.split(counts)), batch_first=True) for name, flat in given.items()}
        result = corrected(self.loss, self.corrections, PolicyLossInputs(**rows))
        # The inverse of pad_sequence: [responses, T] -> [tokens].
        columns = torch.arange(result.loss.shape[1], device=result.loss.device)
        loss = result.loss[columns < torch.tensor(counts, device=result.loss.device)[:, None]]
        if self.context.size > 1:
            loss = loss[batch.owners == self.context.rank]
        return PolicyLossResult(loss, result.metrics if self.context.rank == 0 else {})


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


def _stored_logp(
    batch: MicroBatch, by_sample: Mapping[int, torch.Tensor], like: torch.Tensor, which: str
) -> torch.Tensor:
    unknown = [sample for sample in batch.samples if sample not in by_sample]
    if unknown:
        raise McoreRLError(
            f"samples {unknown} have no {which} log-probabilities: they must be computed before the updates of a batch"
        )
    return torch.cat([like.new_empty(0), *(by_sample[sample] for sample in batch.samples)])
