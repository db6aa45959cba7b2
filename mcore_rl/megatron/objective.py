"""From hidden states to what is trained on: log-probabilities of a micro-batch, its loss and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.algorithms import PolicyLossInputs, PolicyLossResult, policy_loss
from mcore_rl.algorithms.interface import PolicyLoss
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.megatron.context import ALONE, ContextPart
from mcore_rl.megatron.logprobs import linear_logp_entropy
from mcore_rl.megatron.microbatches import MicroBatch
from mcore_rl.megatron.output import output_weight, unwrap
from mcore_rl.types import Max, Mean, Metric

PROVIDED = {"advantages", "old_logp", "rollout_logp", "whole_sequence"}


@dataclass(frozen=True)
class MicroBatchReport:
    """What one micro-batch of the last stage leaves behind. `loss` is its part of the sum over all tokens."""

    loss: float
    metrics: dict[str, Metric]
    non_finite: tuple[int, ...]


@dataclass(frozen=True)
class Objective:
    """The configured loss on micro-batches. `group` is the tensor-parallel group, None for a single rank; `context` is
    the rank's part of every row, of which it reports its own tokens only.

    A loss of advantages is one of the policy that the engine samples from, so its log-probabilities are those of
    rollout.temperature (1 where rollouts are greedy); any other loss sees the model's own distribution.
    """

    loss: PolicyLoss
    temperature: float
    entropy_coefficient: float
    chunk_tokens: int
    group: dist.ProcessGroup | None
    context: ContextPart = ALONE

    @classmethod
    def from_config(cls, config: Config, group: dist.ProcessGroup | None, context: ContextPart = ALONE) -> Objective:
        """Raises: ConfigError for an unknown loss or option, or one that needs what the actor does not have."""
        section = config.algorithm.policy_loss
        options = {field.name: getattr(section, field.name) for field in fields(section) if field.name != "name"}
        loss = policy_loss(section.name, **options)
        lacking = [name for name, needed in vars(loss.needs).items() if needed and name not in PROVIDED]
        if lacking:
            raise ConfigError(f"algorithm.policy_loss.name={section.name} needs {', '.join(lacking)}: not available")
        return cls(
            loss=loss,
            temperature=(config.rollout.temperature or 1.0) if loss.needs.advantages else 1.0,
            entropy_coefficient=config.algorithm.entropy_coefficient,
            chunk_tokens=config.actor.logprob_chunk_tokens,
            group=group,
            context=context,
        )

    def logp(
        self, chunk: torch.nn.Module, hidden: torch.Tensor, batch: MicroBatch, *, compute_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the trained tokens, [N] each.

        Shapes: hidden [T, h] of the whole row. Units: nats.
        Collective: the tensor-parallel group.
        """
        return linear_logp_entropy(
            hidden.index_select(0, batch.predictors),
            output_weight(chunk),
            batch.targets,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            group=self.group,
            compute_entropy=compute_entropy,
            vocab_size=unwrap(chunk).unpadded_vocab_size,
        )

    def evaluate(
        self,
        chunk: torch.nn.Module,
        hidden: torch.Tensor,
        batch: MicroBatch,
        old_logp: dict[int, torch.Tensor],
        *,
        policy_is_old: bool = False,
    ) -> tuple[torch.Tensor, MicroBatchReport]:
        """The micro-batch's loss, a scalar with gradient: the sum over its tokens, each times its response's weight.

        Where the policy is still the old one, its log-probabilities are remembered in old_logp for further epochs.

        Shapes: old_logp maps a sample to [n], its trained tokens on this rank.
        Collective: the tensor-parallel group; the context-parallel group too where the loss needs whole sequences.
        """
        logp, entropy = self.logp(chunk, hidden, batch, compute_entropy=True)
        if policy_is_old:
            parts = logp.detach().split(list(batch.trained_counts))
            old_logp.update(zip(batch.samples, parts, strict=True))
        result = self._per_token(logp, batch, old_logp)
        per_token = result.loss
        if self.entropy_coefficient:
            per_token = per_token - self.entropy_coefficient * entropy
        weighted = per_token * batch.loss_weights
        loss = weighted.sum()
        with torch.no_grad():
            tokens = len(batch.targets)
            suspects = torch.stack((logp, weighted, entropy)) if tokens else None
            report = MicroBatchReport(
                loss=float(loss),
                metrics={
                    "actor/entropy": Mean(float(entropy.sum(dtype=torch.float64)), tokens),
                    **{f"actor/{name}": metric for name, metric in result.metrics.items()},
                    **(mismatch(batch, logp) if policy_is_old else {}),
                },
                non_finite=non_finite_samples(batch, suspects),
            )
        return loss, report

    def _per_token(
        self, logp: torch.Tensor, batch: MicroBatch, old_logp: Mapping[int, torch.Tensor]
    ) -> PolicyLossResult:
        old = _remembered(batch, old_logp, logp) if self.loss.needs.old_logp else None
        inputs = PolicyLossInputs(
            logp=logp,
            mask=torch.ones_like(logp),
            old_logp=old,
            advantages=batch.advantages,
            rollout_logp=batch.logp_rollout,
        )
        if not self.loss.needs.whole_sequence or not len(batch.owners):
            return self.loss(inputs)
        return self._of_whole_responses(inputs, batch)

    def _of_whole_responses(self, inputs: PolicyLossInputs, batch: MicroBatch) -> PolicyLossResult:
        """A loss that reads all tokens of a response at once: of the rank's own tokens, [N].

        Its metrics are of whole responses, so one of the context-parallel ranks reports them for all.
        """
        if self.context.size == 1:
            result = self.loss(_one_response_per_row(inputs, batch.whole_counts))
            return PolicyLossResult(_flat(result.loss, batch), result.metrics)
        given = {name: value for name, value in vars(inputs).items() if value is not None}
        whole = self.context.gather(torch.stack(list(given.values())), batch.owners)
        rows = _one_response_per_row(PolicyLossInputs(**dict(zip(given, whole, strict=True))), batch.whole_counts)
        result = self.loss(rows)
        own = _flat(result.loss, batch)[batch.owners == self.context.rank]
        return PolicyLossResult(own, result.metrics if self.context.rank == 0 else {})


def non_finite_samples(batch: MicroBatch, values: torch.Tensor | None) -> tuple[int, ...]:
    """Samples with a token of which any of `values` [..., N] is not finite."""
    if values is None or bool(torch.isfinite(values).all()):
        return ()
    bad = ~torch.isfinite(values).reshape(-1, values.shape[-1]).all(0)
    parts = bad.split(list(batch.trained_counts))
    return tuple(sample for sample, part in zip(batch.samples, parts, strict=True) if bool(part.any()))


def mismatch(batch: MicroBatch, logp: torch.Tensor) -> dict[str, Metric]:
    """How far the policy's log-probabilities are from those that the engine sampled with."""
    difference = (logp - batch.logp_rollout).abs()
    return {
        "rollout/logp_diff_mean": Mean(float(difference.sum(dtype=torch.float64)), len(difference)),
        "rollout/logp_diff_max": Max(float(difference.max()) if len(difference) else 0.0),
    }


def _remembered(batch: MicroBatch, old_logp: Mapping[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    unknown = [sample for sample in batch.samples if sample not in old_logp]
    if unknown:
        raise McoreRLError(f"samples {unknown} have no old log-probabilities: annotate the batch before its updates")
    return torch.cat([like.new_empty(0), *(old_logp[sample] for sample in batch.samples)])


def _row(flat: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """[N] -> [B, T], one response per row, 0 behind its end."""
    return pad_sequence(list(flat.split(list(counts))), batch_first=True)


def _flat(rows: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The inverse of _row for a micro-batch of whole responses."""
    counts = torch.tensor(batch.whole_counts, device=rows.device)
    return rows[torch.arange(rows.shape[1], device=rows.device) < counts[:, None]]


def _one_response_per_row(inputs: PolicyLossInputs, counts: tuple[int, ...]) -> PolicyLossInputs:
    rows: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        rows[field.name] = None if value is None else _row(value, counts)
    return PolicyLossInputs(**rows)
