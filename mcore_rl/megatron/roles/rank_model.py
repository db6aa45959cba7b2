"""One rank's part of a model, trained or frozen: joining the process group, building micro-batches, running passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_rl.config.models import OffloadConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.megatron.model import parallel
from mcore_rl.megatron.model.context import SINGLE_RANK, ContextPart
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.routers import Routers, RoutingRow
from mcore_rl.megatron.optim.offload import Offloader
from mcore_rl.megatron.optim.optimizer import in_bfloat16
from mcore_rl.megatron.step.microbatches import MicroBatch, Packing, build_microbatches
from mcore_rl.megatron.step.replay import RoutingStore
from mcore_rl.resolved.costs import sequence_cost
from mcore_rl.resolved.implementation import row_multiple
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.types import RankShare, TrajectoryBuffers

Result = TypeVar("Result")
Evaluate = Callable[[torch.nn.Module, MicroBatch, torch.Tensor], Result]
"""Maps a chunk, a micro-batch and the output of the last stage to the result of a pass for the micro-batch."""


class RankModel:
    """The chunks of one model on this rank, with the passes over them. Several models may share the groups of a layout.

    `chunks` are the bare models, `modules` their wrappers (DistributedDataParallel, Float16Module). `name` is the
    prefix of the model's metrics, by default the role's. `group` is the tensor-parallel group, None for one rank.
    `context` is this rank's part of every row, `place` its coordinates in the layout.

    Every token of a batch is on exactly one rank with `counts_tokens`; exactly one rank is the `is_reporting_rank`.

    Collective: every method, over all ranks, unless build_microbatches documents otherwise.
    """

    def __init__(
        self,
        role: ModelRole,
        spec: ResolvedModel,
        rank: int,
        chunks: list[PolicyModel],
        modules: list[torch.nn.Module],
        *,
        name: str | None = None,
    ) -> None:
        self.role, self.name = role, name or role.prefix
        self.hf_config, self.layout, self.rank = spec.hf_config, spec.layout, rank
        self.chunks, self.modules = chunks, modules
        layout = spec.layout
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.place = place = layout.coordinates(rank)
        self.counts_tokens = place.tp == 0 and place.pp == layout.pp - 1
        self.is_reporting_rank = self.counts_tokens and place.dp == place.cp == 0
        self.group = parallel_state.get_tensor_model_parallel_group() if layout.tp > 1 else None
        self.context = SINGLE_RANK
        if layout.cp > 1:
            context_group = parallel_state.get_context_parallel_group()
            self.context = ContextPart(context_group.rank(), context_group.size(), context_group)
        # One rank per stage reports the metrics of the stage's layers.
        counts = place.tp == place.cp == place.dp == 0
        self.routers = Routers(modules, role.section.moe, counts=counts, role=self.name)
        model = chunks[0].config
        self.routing = RoutingStore(
            self.routers.layers,
            num_experts=model.num_moe_experts or 0,
            topk=model.moe_router_topk,
            split=layout.tp if model.sequence_parallel else 1,
            context=self.context,
        )
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
        )
        # Float16Module would otherwise copy the output to float32 (see output.py).
        self._forward_options = {"fp32_output": False} if role.model.dtype == "bfloat16" else {}

    def shutdown(self) -> None:
        """Destroy the process groups."""
        parallel.destroy()

    def microbatches(self, share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> list[MicroBatch]:
        """Pack the share into this model's micro-batches; see build_microbatches."""
        return build_microbatches(share, chunks, self.packing)

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
        """Run a forward pass without gradients.

        Ranks of the last stage get `evaluate(chunk, batch, output)` of every micro-batch in execution order; other
        ranks get [].
        """

        def without_loss(
            chunk: torch.nn.Module, batch: MicroBatch, output: torch.Tensor
        ) -> tuple[torch.Tensor, Result]:
            return output.new_zeros(()), evaluate(chunk, batch, output)

        rows = [self.routing.row(batch) for batch in batches] if rows is None else rows
        with torch.no_grad():
            return self.run(batches, rows, without_loss, forward_only=True)

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
        the results are returned on the last stage."""

        def forward_step(
            iterator: Iterator[tuple[MicroBatch, RoutingRow]], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Result]]]:
            batch, row = next(iterator)
            self.routers.set_row(chunk, row)

            def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
                loss, result = evaluate(chunk, batch, output)
                # Megatron requires a number of tokens, which sum_gradients ignores.
                return loss, torch.tensor(0, dtype=torch.int), result

            options = self._forward_options
            return chunk(batch.tokens[None], None, None, packed_seq_params=batch.sequences, **options), loss_function

        # Every virtual stage passes over all micro-batches.
        iterators = [iter(zip(batches, rows, strict=True)) for _ in self.modules]
        return get_forward_backward_func()(
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


class FrozenModel(RankModel):
    """A model that is not trained. `memory` moves its weights between device and host if `offload` is set.

    `modules` are its chunks in Float16Module for bfloat16.
    """

    def __init__(
        self,
        role: ModelRole,
        spec: ResolvedModel,
        rank: int,
        chunks: list[PolicyModel],
        *,
        offload: bool,
        name: str | None = None,
    ) -> None:
        modules = [in_bfloat16(chunk) if chunk.config.bf16 else chunk for chunk in chunks]
        for module in modules:
            module.requires_grad_(False)
        super().__init__(role, spec, rank, chunks, modules, name=name)
        self.memory = Offloader(modules, None, OffloadConfig(params=offload))
