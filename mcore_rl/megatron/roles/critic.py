"""The critic on one rank: values of all trained tokens, and training of these values towards returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mcore_rl.algorithms.value_loss import compute_value_loss
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import Config
from mcore_rl.megatron.model.loading import fill_value_model
from mcore_rl.megatron.model.value_model import ValueModel
from mcore_rl.megatron.optim.optimizer import updates_of_run
from mcore_rl.megatron.roles.rank_model import TrainedModel, join_and_build
from mcore_rl.megatron.step.loss.trained_tokens import own_tokens
from mcore_rl.megatron.step.microbatches import MicroBatch, distinct_samples
from mcore_rl.megatron.step.objective import MicroBatchReport, non_finite_samples
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.types import Metric, RankShare, TrajectoryBuffers


@dataclass(frozen=True)
class ValuedBatch:
    """The critic's batch: this rank's shares, one per update, their trajectories, and the values before the updates.

    values: the critic's values by sample, on every rank of the last stage.

    Shapes: values float32 [n], all trained tokens of the response.
    """

    shares: Sequence[RankShare]
    chunks: Sequence[TrajectoryBuffers]
    values: Mapping[int, np.ndarray]


class MegatronCritic(TrainedModel):
    """The value model of the section `critic`, with its own layout and optimizer.

    The value of a trained token is the head's output at the position that predicts the token, where the policy has its
    log-probability. `update_epochs` is the number of times that the caller repeats the updates of a batch.
    `init_method` is like MegatronActor's. Router replay is not used, because neither the engine's nor the old policy's
    routing belongs to this model. Multi-token-prediction layers are left out.

    Collective: every method, over all ranks.
    Raises: ConfigError, naming `critic` keys, for a model or layout that cannot be built.
    """

    def __init__(self, config: Config, rank: int, world_size: int, init_method: str | None) -> None:
        self.clip_range, self.update_epochs = config.critic.clip_range, config.critic.update_epochs
        role, seed = ModelRole.critic(config.critic, config.model), config.run.seed
        spec = ResolvedModel.value_model(role, world_size)
        chunks = join_and_build(config, spec, rank, init_method, ValueModel)
        fill_value_model(chunks, role, spec.layout, seed)
        # The schedule counts the critic's own updates.
        num_updates = updates_of_run(config.trainer) * self.update_epochs
        super().__init__(spec, chunks, num_updates=num_updates, seed=seed)

    def values(self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> ValuedBatch:
        """Compute the current values of all samples, each sample once. Ranks of other stages than the last get none.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        share = distinct_samples(shares)
        values_by_row = self.infer(self.microbatches(share, chunks), self.whole_outputs)
        values = {sample: sample_values for row_values in values_by_row for sample, sample_values in row_values.items()}
        bad = [sample for sample, sample_values in values.items() if not np.isfinite(sample_values).all()]
        self.require_finite_samples("value", bad, share)
        return ValuedBatch(shares, chunks, values)

    def update(self, batch: ValuedBatch, index: int, returns: Mapping[int, np.ndarray]) -> dict[str, Metric]:
        """Run one optimizer step on the samples of share `index`. All data-parallel ranks step together.

        Shapes: returns maps each sample of the share to float32 [n], one value per trained token; used on ranks of the
        last stage only.

        Raises: NonFiniteError on every rank, naming the samples, with parameters, optimizer and schedule unchanged.
        """
        microbatches, reports = self.accumulate_gradients(batch, index, returns)
        return self._step(microbatches, reports, index)

    def accumulate_gradients(
        self, batch: ValuedBatch, index: int, returns: Mapping[int, np.ndarray]
    ) -> tuple[list[MicroBatch], list[MicroBatchReport]]:
        """Compute the gradient of the clipped value loss of update `index`; see TrainedModel._accumulate.

        Every token's loss is multiplied by its response's weight.

        Raises: NonFiniteError on every rank.
        """
        microbatches = self.microbatches(batch.shares[index], batch.chunks)
        _, routed = self.token_weights(microbatches)
        rows = [self.routing.row(microbatch, token_weight=routed) for microbatch in microbatches]
        reports = self._accumulate(
            batch.shares[index],
            microbatches,
            rows,
            partial(self._loss, batch.values, returns),
            suspects="value loss, value or return",
        )
        return microbatches, reports

    def _loss(
        self,
        old_values: Mapping[int, np.ndarray],
        returns: Mapping[int, np.ndarray],
        chunk: torch.nn.Module,
        batch: MicroBatch,
        output: torch.Tensor,
    ) -> tuple[torch.Tensor, MicroBatchReport]:
        del chunk
        values = output.index_select(0, batch.predictors)
        target = own_tokens(batch, returns, self.context, "returns")
        result = compute_value_loss(
            values=values,
            old_values=own_tokens(batch, old_values, self.context, "old values"),
            returns=target,
            # All values belong to trained tokens: `predictors` lists no others.
            mask=torch.ones_like(values),
            clip_range=self.clip_range,
        )
        weighted = result.loss * batch.loss_weights
        loss = weighted.sum()
        # This rank may have no trained token in a micro-batch, for example in a dummy.
        suspects = torch.stack((values.detach(), target, weighted.detach())) if len(values) else None
        metrics = {f"critic/{name}": metric for name, metric in result.metrics.items()}
        return loss, MicroBatchReport(float(loss.detach()), metrics, non_finite_samples(batch, suspects))
