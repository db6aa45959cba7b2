"""Training of a model on one rank: gradient accumulation, optimizer steps, learning-rate schedule, offloading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mcore_rl.config.roles import ModelRole
from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.lora.weights import merged_tensors
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.routers import RoutingRow
from mcore_rl.megatron.optim.gradient_norms import gradient_norms
from mcore_rl.megatron.optim.offload import Offloader
from mcore_rl.megatron.optim.optimizer import (
    build_optimizer,
    build_scheduler,
    gather_parameters,
    learning_rate,
    parameters_are_gathered,
    wrap_chunks,
)
from mcore_rl.megatron.roles.rank_model import Evaluate, RankModel
from mcore_rl.megatron.step.finite_check import describe_gradients, describe_samples, require_finite
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.megatron.step.objective import MicroBatchReport
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.types import Mean, Metric, RankShare, Total, merge_metrics

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.reference import FrozenPolicy


class TrainedModel(RankModel):
    """A RankModel in DistributedDataParallel (`ddp`), with optimizer and scheduler.

    A checkpoint contains `chunks` (without the weights under adapters), `optimizer`, `scheduler` and, if set, the
    `saved_reference`. `memory` offloads state; every method loads the parts that it needs. `num_updates` is the number
    of optimizer updates of the run. `seed` is run.seed, from which a resumed run may derive random streams.

    Collective: every method, over all ranks.
    """

    saved_reference: FrozenPolicy | None = None

    def __init__(
        self, role: ModelRole, spec: ResolvedModel, rank: int, chunks: list[PolicyModel], *, num_updates: int, seed: int
    ) -> None:
        self.seed = seed
        self.ddp = wrap_chunks(chunks, role.section)
        # Ranks initialize weights independently, so data-parallel replicas must copy those of one rank.
        if role.model.random_init:
            for chunk in self.ddp:
                chunk.broadcast_params()
        super().__init__(role, spec, rank, chunks, self.ddp)
        # Before the optimizer copies the weights.
        gather_parameters(self.ddp)
        self.optimizer = build_optimizer(self.ddp, role.section.optimizer)
        self.scheduler = build_scheduler(self.optimizer, role, num_updates)
        self.memory = Offloader(self.ddp, self.optimizer, role.section.offload)

    def _accumulate(
        self,
        share: RankShare,
        batches: list[MicroBatch],
        rows: list[RoutingRow],
        evaluate: Evaluate[tuple[torch.Tensor, MicroBatchReport]],
        *,
        suspects: str,
        on_every_replica: bool = False,
    ) -> list[MicroBatchReport]:
        """Accumulate the gradient of the update's loss in the parameters' `main_grad`.

        The gradient is the sum over all tokens of all ranks, independent of the layout and of the micro-batches. It is
        complete only on the data-parallel rank that owns the slice, unless on_every_replica. `evaluate` returns the
        loss and a MicroBatchReport; `suspects` names the quantities of its non_finite samples in errors.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        # An overlapped reduction starts before force_all_reduce takes effect at the end of the pass.
        assert not (on_every_replica and self.role.section.overlap_grad_reduce)
        self.memory.load("params", "grads", "optimizer")
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.routers.reset()
        reports = self.run(batches, rows, evaluate, forward_only=False, force_all_reduce=on_every_replica)
        bad = [sample for report in reports for sample in report.non_finite]
        problem = describe_samples(suspects, bad, share)
        require_finite(problem or describe_gradients(self.ddp, share), self.device)
        return reports

    def _step(
        self, batches: Sequence[MicroBatch], reports: Sequence[MicroBatchReport], update_index: int
    ) -> dict[str, Metric]:
        """Run one optimizer step on the accumulated gradients and return this rank's part of the update's metrics.

        Every token counts on exactly one rank, so the metrics of all ranks can be merged exactly.
        """
        rate = learning_rate(self.optimizer)
        norms = gradient_norms(self.chunks, self.optimizer)  # before they are clipped
        successful, grad_norm, _ = self.optimizer.step()
        # Megatron skips a step only under loss scaling, which float32 and bfloat16 do not use.
        assert successful, f"update {update_index}: the optimizer skipped its step"
        self.scheduler.step(1)
        metrics: dict[str, Metric] = dict(self.routers.finish_update())
        metrics |= {f"{self.name}/grad_norm_{kind}": norm for kind, norm in norms.items()}
        if self.counts_tokens:
            metrics |= merge_metrics([report.metrics for report in reports])
            loss = sum(report.loss for report in reports)
            # The losses of all ranks are added, and divided by 1: the loss is a sum over all tokens.
            metrics[f"{self.name}/loss"] = Mean(loss, 1 if self.is_reporting_rank else 0)
            metrics[f"{self.name}/trained_tokens"] = Total(sum(len(batch.targets) for batch in batches))
            metrics[f"{self.name}/tokens"] = Total(sum(len(batch.tokens) for batch in batches))
        # The norm covers the gradients of all ranks and is equal on each of them.
        if self.is_reporting_rank:
            metrics[f"{self.name}/grad_norm"] = Mean(float(grad_norm), 1)
            metrics[f"{self.name}/lr"] = Mean(rate, 1)
            metrics[f"{self.name}/microbatches"] = Mean(len(batches), 1)
        return metrics

    def gather_parameters(self) -> None:
        """Gather this rank's parameters after an update. Does nothing if they are gathered.

        Call it before `tensors` or a checkpoint: with overlap_param_gather, a step defers the gathering to the next
        forward pass.
        """
        self.memory.load("params")
        gather_parameters(self.ddp)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's live tensors by canonical name; loads offloaded parameters. Not collective.

        In a LoRA run the adapters are merged into a weight when it is read.

        Raises: McoreRLError when `gather_parameters` has not been called since the last update.
        """
        if not parameters_are_gathered(self.ddp):
            raise McoreRLError("parameters are not whole after an update: call gather_parameters on all ranks first")
        self.memory.load("params")
        return merged_tensors(self.chunks)
