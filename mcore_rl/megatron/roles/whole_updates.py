"""Passes and reductions over all samples of an update, before the backward passes of its micro-batches."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_rl.config.schema import Config
from mcore_rl.megatron.roles.rank_model import TrainedModel
from mcore_rl.megatron.step.loss.rank_batch import RankBatch
from mcore_rl.megatron.step.loss.token_choice import TokenChoice
from mcore_rl.megatron.step.loss.trained_tokens import whole_by_sample
from mcore_rl.megatron.step.microbatches import MicroBatch, distinct_samples
from mcore_rl.megatron.step.objective import Objective, UpdatePart


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
        self.require_finite_samples("norm of the score", bad, every)
        return norms

    def choose_tokens(
        self, batch: RankBatch, index: int, microbatches: list[MicroBatch], *, replays: bool
    ) -> list[TokenChoice]:
        """Compute what each loss of update `index` needs from the whole update, with an extra forward pass if one needs
        current log-probabilities.

        Collective: all ranks.
        """
        objective, policy_is_old = self.objective, index == 0
        compares = objective.needs.whole_group
        nothing = [TokenChoice()] * len(objective.losses)
        if not (objective.chooses_tokens or compares):
            return nothing
        parts: list[UpdatePart] = [(microbatch, None, None) for microbatch in microbatches]
        if objective.infers_before_update(policy_is_old=policy_is_old):
            rows = [self.routing.row(microbatch, replays=replays) for microbatch in microbatches]
            parts = [*self.infer(microbatches, objective.outputs.logp_and_entropy_of, rows)]
        # Ranks of other stages have no log-probabilities and take no part in the reductions.
        if self.place.pp < self.layout.pp - 1:
            return nothing
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)

        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(tensor, group=group)
            return tensor

        share, most = batch.shares[index], torch.zeros(1, dtype=torch.int64, device=self.device)
        if compares:
            most += int(share.samples.max(initial=0)) + 1
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        seed = self.config.run.seed + 1_000_003 * self.scheduler.num_steps  # a different seed for every update
        return objective.choose(parts, batch, share, seed=seed, num_samples=int(most), all_reduce=all_reduce)
