"""Passes and reductions over all samples of an update, before the backward passes of its micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_rl.config.schema import Config
from mcore_rl.megatron.roles.rank_model import TrainedModel
from mcore_rl.megatron.step.finite_check import describe_samples, require_finite
from mcore_rl.megatron.step.microbatches import MicroBatch, distinct_samples, whole_by_sample
from mcore_rl.megatron.step.objective import Objective, RankBatch
from mcore_rl.megatron.step.token_choice import TokenChoice


class WholeUpdates(TrainedModel):
    """The policy on one rank, with the passes and reductions over all samples of an update or a step."""

    config: Config
    objective: Objective

    def score_norms(self, batch: RankBatch) -> dict[int, np.ndarray]:
        """Compute the squared norms of the scores of all tokens, for the policy before the updates; empty on ranks of
        other stages than the last. Shapes: float32 [n] by sample."""
        every = distinct_samples(batch.shares)
        found = self.infer(self.microbatches(every, batch.chunks), self.objective.outputs.score_norms_of)
        norms: dict[int, np.ndarray] = {}
        for microbatch, values in found:
            if microbatch.samples:
                norms |= whole_by_sample(microbatch, values, self.context)
        bad = [sample for sample, values in norms.items() if not np.isfinite(values).all()]
        require_finite(describe_samples("norm of the score", bad, every), self.device)
        return norms

    def response_weight(self, microbatches: list[MicroBatch]) -> float:
        """Return 1 / (responses of the update with a loss weight) on all ranks."""
        observed = [each.observations for each in microbatches if each.observations is not None]
        count = torch.tensor([sum(each.responses for each in observed)], dtype=torch.int64, device=self.device)
        dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
        return 1 / max(int(count), 1)

    def choose_tokens(
        self, batch: RankBatch, index: int, microbatches: list[MicroBatch], *, replays: bool
    ) -> TokenChoice:
        """Compute what the loss of update `index` needs from the whole update, with an extra forward pass if it needs
        current log-probabilities.

        Collective: all ranks.
        """
        objective, policy_is_old = self.objective, index == 0
        compares = objective.loss.needs.whole_group
        if not (objective.chooses_tokens or compares):
            return TokenChoice()
        found: list[tuple[MicroBatch, torch.Tensor, torch.Tensor]] = []
        infers = objective.infers_before_update(policy_is_old=policy_is_old)
        if infers:
            rows = [self.routing.row(microbatch, replays=replays) for microbatch in microbatches]
            found = self.infer(microbatches, objective.outputs.logp_and_entropy_of, rows)
        # Ranks of other stages have no log-probabilities and take no part in the reductions.
        if self.place.pp < self.layout.pp - 1:
            return TokenChoice()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)

        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(tensor, group=group)
            return tensor

        choice = TokenChoice()
        if objective.chooses_tokens:
            seed = self.config.run.seed + 1_000_003 * self.scheduler.num_steps  # a different seed for every update
            choice = objective.choose_tokens(found, batch, seed=seed, all_reduce=all_reduce)
        if not compares:
            return choice
        parts = [(each, logp) for each, logp, _ in found] if infers else [(each, None) for each in microbatches]
        share = batch.shares[index]
        most = torch.tensor([share.samples.max(initial=0) + 1], dtype=torch.int64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return replace(choice, groups=objective.group_terms(parts, batch, share, int(most), all_reduce=all_reduce))
