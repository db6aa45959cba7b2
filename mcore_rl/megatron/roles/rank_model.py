"""One rank's part of a model, trained or frozen: micro-batches, passes, gradient accumulation, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_rl.config.models import OffloadConfig
from mcore_rl.config.rules.precision import overflow_advice
from mcore_rl.config.schema import Config
from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.lora.adapters import merged_tensors
from mcore_rl.megatron.model import parallel
from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.model.model import build_model
from mcore_rl.megatron.model.output import ModelChunk, PolicyModel
from mcore_rl.megatron.model.routers import Routers, RoutingRow
from mcore_rl.megatron.model.shards import reshard
from mcore_rl.megatron.optim.gradient_norms import gradient_norms
from mcore_rl.megatron.optim.loss_scale import LossScaler
from mcore_rl.megatron.optim.offload import Offloader
from mcore_rl.megatron.optim.optimizer import (
    broadcast_parameters,
    build_optimizer,
    build_scheduler,
    gather_parameters,
    parameters_are_gathered,
    release_gradients,
    wrap_chunks,
    wrap_frozen,
)
from mcore_rl.megatron.step.finite_check import describe_gradients, describe_samples, require_finite
from mcore_rl.megatron.step.loss.trained_tokens import whole_by_sample
from mcore_rl.megatron.step.microbatches import MicroBatch, Packing, build_microbatches
from mcore_rl.megatron.step.objective import MicroBatchReport
from mcore_rl.megatron.step.replay import RoutingStore
from mcore_rl.resolved.costs import sequence_cost
from mcore_rl.resolved.implementation import row_multiple
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.types import Mean, Metric, RankShare, Total, TrajectoryBuffers, merge_metrics

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.moving_average import MovingAverage
    from mcore_rl.megatron.roles.reference import FrozenPolicy

Result = TypeVar("Result")
Evaluate = Callable[[torch.nn.Module, MicroBatch, torch.Tensor], Result]
"""Maps a chunk, a micro-batch and the output of the last stage to the result of a pass for the micro-batch."""


def join_and_build(
    config: Config, spec: ResolvedModel, rank: int, init_method: str | None, kind: type[PolicyModel] = PolicyModel
) -> list[ModelChunk]:
    """Join the process group, and build this rank's chunks; the caller loads their weights.

    Collective: all ranks of the layout.
    """
    join(config, spec, rank, init_method)
    return build_model(spec, gpus_per_node=config.cluster.gpus_per_node, kind=kind)


def join(config: Config, spec: ResolvedModel, rank: int, init_method: str | None) -> None:
    """Join the process group of a model's ranks; see parallel.initialize.

    Collective: all ranks of the layout.
    """
    seconds, seed = config.cluster.collective_timeout_seconds, config.run.seed
    parallel.initialize(spec.layout, rank=rank, init_method=init_method, timeout_seconds=seconds, seed=seed)


class RankModel:
    """The chunks of one model on this rank, with the passes over them. Several models may share the groups of a layout.

    `chunks` are the bare models, `modules` their wrappers (DistributedDataParallel, Float16Module). `name` is the
    prefix of the model's metrics, by default the role's. `group` is the tensor-parallel group, None for one rank.
    `context` is this rank's part of every row, `place` its coordinates in the layout.

    `memory` moves its state between device and host. Every token of a batch is on exactly one rank with
    `counts_tokens`; exactly one rank is the `is_reporting_rank`.

    Collective: every method, over all ranks, unless build_microbatches documents otherwise.
    """

    memory: Offloader

    def __init__(
        self, spec: ResolvedModel, chunks: list[ModelChunk], modules: list[torch.nn.Module], *, name: str | None = None
    ) -> None:
        role, layout = spec.role, spec.layout
        self.role, self.hf_config, self.layout = role, spec.hf_config, layout
        self.name, self.rank = name or role.prefix, dist.get_rank()
        self.chunks, self.modules = chunks, modules
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.place = place = layout.coordinates(self.rank)
        self.counts_tokens = place.tp == 0 and place.pp == layout.pp - 1
        self.is_reporting_rank = self.counts_tokens and place.dp == place.cp == 0
        self.group = parallel_state.get_tensor_model_parallel_group() if layout.tp > 1 else None
        self.context = ContextPart.of(parallel_state.get_context_parallel_group())
        # One rank per stage reports the metrics of the stage's layers.
        counts = place.tp == place.cp == place.dp == 0
        self.routers = Routers(modules, role.section.moe, counts=counts, role=self.name)
        self.routing = RoutingStore(self.routers.layers, chunks[0].config, self.context)
        self.packing = Packing(
            tokens=role.section.tokens_per_microbatch,
            cost=sequence_cost(spec.hf_config),
            # Sequence parallelism splits a row over tp ranks, and FP8 kernels need aligned parts.
            row_multiple=layout.tp * row_multiple(role.section.fp8),
            # The interleaved schedule requires a multiple of the pipeline stages.
            count_multiple=layout.pp if layout.vpp else 1,
            group=parallel_state.get_data_parallel_group() if layout.dp > 1 else None,
            device=self.device,
            context=self.context,
            vision=spec.arguments.vision,
        )
        # Float16Module would otherwise copy the output to float32 (see output.py).
        self._forward_options = {"fp32_output": False} if chunks[0].config.params_dtype != torch.float32 else {}

    def shutdown(self) -> None:
        """Destroy the process groups."""
        parallel.destroy()

    def microbatches(self, share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> list[MicroBatch]:
        """Pack the share into this model's micro-batches; see build_microbatches."""
        return build_microbatches(share, chunks, self.packing)

    def require_finite_samples(self, what: str, samples: Iterable[int], share: RankShare) -> None:
        """Raise NonFiniteError on every rank if any rank has `samples`, whose value `what` of this model is not finite.

        Collective: all ranks.
        """
        advice = overflow_advice(self.role.dtype_key) if self.chunks[0].config.fp16 else ""
        require_finite(describe_samples(what, samples, share), self.device, remedy=advice)

    def token_weights(self, batches: list[MicroBatch]) -> tuple[float, float]:
        """Return 1 / (trained tokens) and 1 / (computed tokens) of the update on all ranks, without padding."""
        rank_counts = [sum(len(batch.targets) for batch in batches), sum(sum(batch.lengths) for batch in batches)]
        counts = torch.tensor(rank_counts, dtype=torch.int64, device=self.device)
        dist.all_reduce(counts, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        trained, computed = counts.tolist()
        # Context-parallel ranks share a row, and each of them counts all of its tokens.
        return 1 / max(trained, 1), self.layout.cp / max(computed, 1)

    def infer(
        self, batches: list[MicroBatch], evaluate: Evaluate[Result], rows: list[RoutingRow] | None = None
    ) -> list[Result]:
        """Run a forward pass without gradients; loads offloaded parameters.

        Ranks of the last stage get `evaluate(chunk, batch, output)` of every micro-batch in execution order; other
        ranks get [].
        """

        def without_loss(
            chunk: torch.nn.Module, batch: MicroBatch, output: torch.Tensor
        ) -> tuple[torch.Tensor, Result]:
            return output.new_zeros(()), evaluate(chunk, batch, output)

        self.memory.load("params")
        rows = [self.routing.row(batch) for batch in batches] if rows is None else rows
        with torch.no_grad():
            return self.run(batches, rows, without_loss, forward_only=True)

    def whole_outputs(self, chunk: torch.nn.Module, batch: MicroBatch, output: torch.Tensor) -> dict[int, np.ndarray]:
        """Gather the output of a value model at the predictors of all trained tokens, by sample, for `infer`."""
        del chunk
        return whole_by_sample(batch, output.index_select(0, batch.predictors), self.context)

    def run(
        self,
        batches: list[MicroBatch],
        rows: list[RoutingRow],
        evaluate: Evaluate[tuple[torch.Tensor, Result]],
        *,
        forward_only: bool,
        force_all_reduce: bool = False,
    ) -> list[Result]:
        """Run Megatron's schedule over the micro-batches. `evaluate` returns the loss and the result of a micro-batch;
        the results are returned on the last stage.

        With force_all_reduce, gradients are complete on every data-parallel rank, for comparisons in tests.
        """
        # An overlapped reduction starts before force_all_reduce takes effect at the end of the pass.
        assert not (force_all_reduce and self.role.section.overlap_grad_reduce)

        def forward_step(
            iterator: Iterator[tuple[MicroBatch, RoutingRow]], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Result]]]:
            batch, row = next(iterator)
            self.routers.set_row(chunk, row)

            def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
                loss, result = evaluate(chunk, batch, output)
                # Megatron requires a number of tokens, which sum_gradients ignores.
                return loss, torch.tensor(0, dtype=torch.int), result

            options = self._forward_options | ({} if batch.images is None else {"images": batch.images})
            output = chunk(batch.tokens[None], batch.positions, None, packed_seq_params=batch.sequences, **options)
            return output, loss_function

        # Every virtual stage passes over all micro-batches.
        iterators = [iter(zip(batches, rows, strict=True)) for _ in self.modules]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.modules if len(self.modules) > 1 else self.modules[0],
            num_microbatches=len(batches),
            # Placeholders: with variable_seq_lengths the stages exchange the actual shapes.
            seq_length=self.role.section.tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
        )
        for module in self.modules:
            reshard(module)
        return results


class FrozenModel(RankModel):
    """A model that is not trained. `memory` moves its weights between device and host if `offload` is set.

    `modules` are its chunks in Float16Module for 16-bit dtypes, and in ShardedDataParallel for sharded parameters.
    """

    def __init__(
        self, spec: ResolvedModel, chunks: list[ModelChunk], *, offload: bool, name: str | None = None
    ) -> None:
        for chunk in chunks:
            chunk.requires_grad_(False)
        modules = wrap_frozen(chunks, spec.role.section)
        super().__init__(spec, chunks, modules, name=name)
        self.memory = Offloader(modules, None, OffloadConfig(params=offload))


class TrainedModel(RankModel):
    """A RankModel in DistributedDataParallel or ShardedDataParallel (`ddp`), with optimizer and scheduler.

    A checkpoint contains `chunks` (without the weights under adapters), `optimizer`, `scheduler`, the `loss_scaler` of
    a float16 model, the `saved_reference` if it is set, and the `averages` of the weights, by the number of the
    teacher. `memory` offloads state; every method loads the parts that it needs. `num_updates` is the number of
    optimizer updates of the run. `seed` is run.seed, from which a resumed run may derive random streams.

    Collective: every method, over all ranks.
    """

    saved_reference: FrozenPolicy | None = None
    averages: Mapping[int, MovingAverage] = MappingProxyType({})

    def __init__(self, spec: ResolvedModel, chunks: list[ModelChunk], *, num_updates: int, seed: int) -> None:
        role, self.seed = spec.role, seed
        # Ranks initialize weights independently, so data-parallel replicas must copy those of one rank.
        if role.model.random_init:
            broadcast_parameters(chunks)
        self.ddp = wrap_chunks(chunks, role.section)
        super().__init__(spec, chunks, self.ddp)
        # Before the optimizer copies the weights.
        gather_parameters(self.ddp)
        settings = role.section.optimizer
        fp16, key = chunks[0].config.fp16, role.key("optimizer.loss_scale")
        self.loss_scaler = LossScaler(settings.loss_scale, key) if fp16 else None
        self.optimizer = build_optimizer(self.ddp, settings, self.loss_scaler)
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
    ) -> list[MicroBatchReport]:
        """Accumulate the gradient of the update's loss in the parameters' `main_grad`.

        The gradient is the sum over all tokens of all ranks, independent of the layout and of the micro-batches. It is
        complete only on the data-parallel rank that owns the slice. `evaluate` returns the loss and a MicroBatchReport;
        `suspects` names the quantities of its non_finite samples in errors. In float16 the gradient is multiplied by
        the loss scale, and may be infinite while the scale can be lowered: `_step` then skips the update.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        self.memory.load("params", "grads", "optimizer")
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.routers.reset()
        reports = self.run(batches, rows, evaluate, forward_only=False)
        bad = [sample for report in reports for sample in report.non_finite]
        scaler, remedy, problem = self.loss_scaler, "", describe_samples(suspects, bad, share)
        if scaler is not None:
            # No loss scale helps samples, and their gradients are not finite either, possibly on other ranks.
            require_finite(problem, self.device, remedy=overflow_advice(self.role.dtype_key))
            if not scaler.is_exhausted:
                return reports
            remedy = scaler.gradient_remedy
        require_finite(problem or describe_gradients(self.ddp, share), self.device, remedy=remedy)
        return reports

    def _step(
        self, batches: Sequence[MicroBatch], reports: Sequence[MicroBatchReport], update_index: int
    ) -> dict[str, Metric]:
        """Run one optimizer step on the accumulated gradients and return this rank's part of the update's metrics.

        Without a finite gradient, in float16, the step is skipped: weights, moments, expert biases and schedule keep
        their values, the loss scale may be lowered, and metrics of gradients are left out.

        Every token counts on exactly one rank, so the metrics of all ranks can be merged exactly.
        """
        rate = float(self.optimizer.param_groups[0]["lr"])
        scaler = self.loss_scaler
        scale = 1.0 if scaler is None else scaler.value
        norms = gradient_norms(self.ddp, self.optimizer, scale=scale)  # before they are clipped
        successful, grad_norm, _ = self.optimizer.step()
        assert successful or scaler is not None, f"update {update_index}: the optimizer skipped its step"
        release_gradients(self.ddp)
        if scaler is not None:
            scaler.finish_update()
        metrics: dict[str, Metric] = dict(self.routers.finish_update(skipped=not successful))
        if successful:
            self.scheduler.step(1)
            metrics |= {f"{self.name}/grad_norm_{kind}": norm for kind, norm in norms.items()}
        if self.counts_tokens:
            metrics |= merge_metrics([report.metrics for report in reports])
            loss = sum(report.loss for report in reports)
            # The losses of all ranks are added, and divided by 1: the loss is a sum over all tokens.
            metrics[f"{self.name}/loss"] = Mean(loss, 1 if self.is_reporting_rank else 0)
            metrics[f"{self.name}/trained_tokens"] = Total(sum(len(batch.targets) for batch in batches))
            metrics[f"{self.name}/tokens"] = Total(sum(len(batch.tokens) for batch in batches))
        # The norm covers the gradients of all ranks and is equal on each of them.
        if self.is_reporting_rank and successful:
            metrics[f"{self.name}/grad_norm"] = Mean(float(grad_norm), 1)
        if self.is_reporting_rank and scaler is not None:
            metrics[f"{self.name}/loss_scale"] = Mean(scale, 1)
            metrics[f"{self.name}/skipped_updates"] = Total(int(not successful))
        if self.is_reporting_rank:
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
        """Return this rank's live tensors by canonical name, with sharded parameters its rows of them; loads offloaded
        parameters. Not collective.

        In a LoRA run the adapters are merged into a weight when it is read.

        Raises: McoreRLError when `gather_parameters` has not been called since the last update.
        """
        if not parameters_are_gathered(self.ddp):
            raise McoreRLError("parameters are not whole after an update: call gather_parameters on all ranks first")
        self.memory.load("params")
        return merged_tensors(self.chunks)
