"""Loss of trained tokens, for the responses of the data sources that share it: policy loss, corrections and terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.algorithms import Correction, PolicyLossInputs, PolicyLossResult
from mcore_rl.algorithms.configured import configured_corrections, configured_losses
from mcore_rl.algorithms.corrections import corrected
from mcore_rl.algorithms.group_scores import WholeGroupLoss, group_terms
from mcore_rl.algorithms.interface import PolicyLoss
from mcore_rl.algorithms.passes import chooses_tokens, needs_old_logp, passes_before_update
from mcore_rl.algorithms.selection import AllReduce, SelectiveLoss, choose, highest, mean_bound, token_keys
from mcore_rl.algorithms.terms import add_terms
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.rules.teacher import uses_teacher
from mcore_rl.config.schema import Config
from mcore_rl.megatron.model.attention.context import SINGLE_RANK, ContextPart
from mcore_rl.megatron.step.distillation import Distillation
from mcore_rl.megatron.step.loss.rank_batch import RankBatch, stored_logp
from mcore_rl.megatron.step.loss.token_choice import TokenChoice, joined_flags, joined_terms
from mcore_rl.megatron.step.loss.trained_tokens import TrainedTokens, by_sample, own_tokens, samples_and_positions
from mcore_rl.types import Mean, Metric, RankShare


@dataclass(frozen=True)
class TokenLoss:
    """One of the configured losses, applied to the tokens of its responses only.

    algorithm: its entry of AlgorithmConfig.loss_settings. corrections: corrections of the mismatch between engine and
    trainer. context: the rank's part of every row; it reports metrics of its own tokens only. distillation: terms of
    the teacher; None without one. source: the data_source that has this loss; None: all without a loss of their own.
    """

    algorithm: AlgorithmConfig
    loss: PolicyLoss
    corrections: tuple[Correction, ...]
    context: ContextPart = SINGLE_RANK
    distillation: Distillation | None = None
    source: str | None = None

    @classmethod
    def all_of(cls, config: Config, context: ContextPart = SINGLE_RANK) -> tuple[TokenLoss, ...]:
        """Build the configured losses, in the order of AlgorithmConfig.loss_settings. Raises: ConfigError like
        configured_losses."""
        algorithm, losses = config.algorithm, configured_losses(config.algorithm)
        distillation = Distillation(config.teacher) if uses_teacher(config.teacher) else None
        parts = zip(algorithm.loss_settings, losses, [None, *algorithm.loss_sources], strict=True)
        return tuple(
            cls(settings, loss, configured_corrections(config, loss), context, distillation, source)
            for settings, loss, source in parts
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
        logp: torch.Tensor,
        entropy: torch.Tensor,
        batch: TrainedTokens,
        rank_batch: RankBatch,
        choice: TokenChoice,
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Compute the loss of each token, with gradient and without its weight, and metrics.

        Shapes: logp, entropy and the loss [N]. Units: nats.
        Collective: the context-parallel group, if the loss or a correction needs whole sequences.
        """
        inputs = self._inputs(logp, batch, rank_batch)
        per_token, metrics = self._policy_loss(inputs, batch, choice)
        has_kl, bonus = self.algorithm.kl.in_loss > 0, rank_batch.entropy_coefficient
        per_token, of_terms = add_terms(
            per_token,
            self.algorithm,
            inputs,
            entropy=entropy,
            entropy_coefficient=self.algorithm.entropy_coefficient if bonus is None else bonus,
            ref_logp=stored_logp(batch, rank_batch.ref_logp, logp, "reference") if has_kl else None,
        )
        return per_token, metrics | of_terms

    def choose_tokens(
        self,
        parts: Sequence[tuple[TrainedTokens, torch.Tensor, torch.Tensor]],
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
        parts: Sequence[tuple[TrainedTokens, torch.Tensor | None]],
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
        device = parts[0][0].targets.device
        loss = cast(WholeGroupLoss, self.loss)
        return group_terms(loss, tokens, groups, num_samples, device=device, all_reduce=all_reduce)

    def old_logp(self, logp: torch.Tensor, batch: TrainedTokens, rank_batch: RankBatch) -> torch.Tensor | None:
        """Return the log-probabilities of the old policy, [N] like the current ones; None if nothing reads them."""
        if self.needs_old_logp:
            return stored_logp(batch, rank_batch.old_logp, logp, "old")
        return batch.logp_rollout if self.algorithm.old_logp == "rollout" else None

    def _policy_loss(
        self, inputs: PolicyLossInputs, batch: TrainedTokens, choice: TokenChoice
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

    def _inputs(self, logp: torch.Tensor, batch: TrainedTokens, rank_batch: RankBatch) -> PolicyLossInputs:
        advantages, old = rank_batch.token_advantages, self.old_logp(logp, batch, rank_batch)
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

    def _per_token(self, inputs: PolicyLossInputs, batch: TrainedTokens) -> PolicyLossResult:
        corrects_whole = any(correction.needs_whole_sequence for correction in self.corrections)
        if not (self.loss.needs.whole_sequence or corrects_whole):
            return corrected(self.loss, self.corrections, inputs)
        return self._on_whole_responses({n: value for n, value in vars(inputs).items() if value is not None}, batch)

    def _on_whole_responses(self, given: dict[str, torch.Tensor], batch: TrainedTokens) -> PolicyLossResult:
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
