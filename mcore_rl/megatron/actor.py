"""One rank of the policy under training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.megatron import cpu, parallel
from mcore_rl.megatron.context import ALONE, ContextPart
from mcore_rl.megatron.costs import sequence_cost
from mcore_rl.megatron.finite import describe_gradients, describe_samples, require_finite
from mcore_rl.megatron.implementation import row_multiple
from mcore_rl.megatron.layout import train_layout
from mcore_rl.megatron.loading import load_hf
from mcore_rl.megatron.microbatches import MicroBatch, Packing, build_microbatches
from mcore_rl.megatron.model import build_model
from mcore_rl.megatron.mtp import MTPObjective
from mcore_rl.megatron.names import canonical_tensors
from mcore_rl.megatron.objective import MicroBatchReport, Objective, mismatch, non_finite_samples
from mcore_rl.megatron.offload import Offloader
from mcore_rl.megatron.optimizer import (
    build_optimizer,
    build_scheduler,
    gather_parameters,
    learning_rate,
    parameters_are_gathered,
    wrap_chunks,
)
from mcore_rl.megatron.replay import RoutingStore
from mcore_rl.megatron.routers import Routers, Row
from mcore_rl.types import Mean, Metric, RankShare, Total, TrajectoryBuffers, merge_metrics
from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.hf_config import read_hf_config
from model_converters.mtp import num_mtp_layers, without_mtp
from model_converters.placement import TensorPlan
from model_converters.plan import export_plan
from model_converters.table import bind

cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

logger = logging.getLogger(__name__)

LossClosure = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Any]]


class MegatronActor:
    """Builds the model in its layout and trains it. Every method is collective over all ranks.

    `chunks` are the bare model chunks, `ddp` the same in DistributedDataParallel; with `optimizer` and `scheduler`
    they are all that a checkpoint holds. `old_logp` maps a sample to the annotated log-probabilities of its trained
    tokens, on the ranks of the last stage; each context-parallel rank has those of its own part of the sequence.
    `memory` offloads; every method loads what it needs.

    `init_method` is tcp://host:port of the process group to join; None: this process is in one already.

    Every token is counted in the metrics of exactly one rank, so merging those of all ranks is exact.

    Raises: ConfigError for a model or layout that cannot be built.
    """

    def __init__(self, config: Config, rank: int, world_size: int, init_method: str | None) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.hf_config = _hf_config(config, speaks=rank == 0)
        self.layout = train_layout(config.actor.parallel, world_size, self.hf_config)
        timeout_seconds, seed = config.cluster.collective_timeout_seconds, config.run.seed
        if init_method is None:
            parallel.initialize_groups(self.layout, timeout_seconds=timeout_seconds, seed=seed)
        else:
            parallel.initialize(
                self.layout,
                rank=rank,
                init_method=init_method,
                device="cuda" if torch.cuda.is_available() else "cpu",
                timeout_seconds=timeout_seconds,
                seed=seed,
            )
        self._build()

    def _build(self) -> None:
        config = self.config
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
        self.chunks = build_model(
            self.hf_config, config.actor, config.model, self.layout, gpus_per_node=config.cluster.gpus_per_node
        )
        if not config.model.random_init:
            load_hf(self.chunks, config.model.hf_path, self.layout)
        self.ddp = wrap_chunks(self.chunks, config.actor)
        if config.model.random_init:
            for chunk in self.ddp:
                chunk.broadcast_params()
        moe, place = config.actor.moe, self.layout.coordinates(self.rank)
        self.routers = Routers(self.ddp, moe, counts=place.tp == place.cp == place.dp == 0)
        model = self.chunks[0].config
        self.routing = RoutingStore(
            self.routers.layers,
            num_experts=model.num_moe_experts or 0,
            topk=model.moe_router_topk,
            split=self.layout.tp if model.sequence_parallel else 1,
            context=self._context_part(),
        )
        gather_parameters(self.ddp)
        self.optimizer = build_optimizer(self.ddp, config.actor.optimizer)
        self.scheduler = build_scheduler(self.optimizer, config)
        self.memory = Offloader(self.ddp, self.optimizer, config.actor.offload)
        group = parallel_state.get_tensor_model_parallel_group() if self.layout.tp > 1 else None
        context = self._context_part()
        self.objective = Objective.from_config(config, group, context)
        self.mtp: MTPObjective | None = None
        if config.actor.mtp_loss_coefficient:
            self.mtp = MTPObjective(config.actor.mtp_loss_coefficient, config.actor.logprob_chunk_tokens, group)
        self._forward_options = {"fp32_output": False} if config.model.dtype == "bfloat16" else {}
        self._packing = Packing(
            tokens=config.actor.tokens_per_microbatch,
            cost=sequence_cost(self.hf_config),
            row_multiple=self.layout.tp * row_multiple(config.actor.fp8),
            count_multiple=self.layout.pp if self.layout.vpp else 1,
            group=parallel_state.get_data_parallel_group() if self.layout.dp > 1 else None,
            device=self.device,
            context=context,
        )
        self._counts_tokens = place.tp == 0 and place.pp == self.layout.pp - 1
        self._speaks_for_all = self._counts_tokens and place.dp == place.cp == 0
        self.old_logp: dict[int, torch.Tensor] = {}
        self._policy_is_old = self._replays = False

    def _context_part(self) -> ContextPart:
        if self.layout.cp == 1:
            return ALONE
        group = parallel_state.get_context_parallel_group()
        return ContextPart(group.rank(), group.size(), group)

    def annotate(self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> dict[str, Metric]:
        """Recomputes the log-probabilities of the current policy for the samples of all updates but the first, once
        each. They stay on the ranks of the last stage until the next call.

        The first update starts from the very policy that they are of: its own forward pass gives those of its samples,
        and its metrics then hold what annotation would have found of them.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        self.old_logp, self._policy_is_old = {}, True
        # A single update is of the old policy throughout: its routing is its own.
        self._replays = self.config.actor.moe.router_replay == "policy" and len(shares) > 1
        if len(shares) == 1:
            return {}
        self.memory.load("params")
        share = _later_samples(shares)
        batches = build_microbatches(share, chunks, self._packing)
        rows = [self.routing.row(batch, records=self._replays) for batch in batches]
        with torch.no_grad():
            found = self._run(batches, rows, self._annotation_closure, forward_only=True)
        self.routing.keep(batches, rows)
        self.old_logp = {
            sample: part
            for batch, logp in found
            for sample, part in zip(batch.samples, logp.split(list(batch.trained_counts)), strict=True)
        }
        bad = [sample for batch, logp in found for sample in non_finite_samples(batch, logp)]
        require_finite(describe_samples("log-probability", bad, share), self.device)
        return merge_metrics([mismatch(batch, logp) for batch, logp in found]) if self._counts_tokens else {}

    def update(self, share: RankShare, chunks: Sequence[TrajectoryBuffers], update_index: int) -> dict[str, Metric]:
        """One optimizer step on the share's samples, together with the other data-parallel ranks on theirs.

        Raises: NonFiniteError on every rank, naming the samples, with parameters, optimizer and schedule untouched.
        """
        batches, reports = self.accumulate_gradients(share, chunks)
        self._policy_is_old = False
        rate = learning_rate(self.optimizer)
        successful, grad_norm, _ = self.optimizer.step()
        # Megatron skips a step only under loss scaling, which float32 and bfloat16 do not use.
        assert successful, f"update {update_index}: the optimizer skipped its step"
        self.scheduler.step(1)
        metrics = self.routers.finish_update()
        if self._counts_tokens:
            metrics |= merge_metrics([report.metrics for report in reports])
            loss = sum(report.loss for report in reports)
            metrics["actor/loss"] = Mean(loss, 1 if self._speaks_for_all else 0)
            metrics["actor/trained_tokens"] = Total(sum(len(batch.targets) for batch in batches))
            metrics["actor/tokens"] = Total(sum(len(batch.tokens) for batch in batches))
        if self._speaks_for_all:
            metrics["actor/grad_norm"] = Mean(float(grad_norm), 1)
            metrics["actor/lr"] = Mean(rate, 1)
            metrics["actor/microbatches"] = Mean(len(batches), 1)
        return metrics

    def accumulate_gradients(
        self, share: RankShare, chunks: Sequence[TrajectoryBuffers], *, on_every_replica: bool = False
    ) -> tuple[list[MicroBatch], list[MicroBatchReport]]:
        """Leaves the gradient of the update's loss in the parameters' `main_grad`: the sum over all tokens of all
        ranks, whatever the layout and the cut into micro-batches.

        It is whole only on the data-parallel rank that owns the slice, unless on_every_replica.

        Raises: NonFiniteError on every rank.
        """
        # An overlapped reduction is under way before the end of the pass says on which ranks the sum is wanted.
        assert not (on_every_replica and self.config.actor.overlap_grad_reduce)
        self.memory.load("params", "grads", "optimizer")
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.routers.reset()
        batches = build_microbatches(share, chunks, self._packing)
        trained, routed = self._token_weights(batches)
        own = self._policy_is_old
        rows = [
            self.routing.row(
                batch, token_weight=routed, replays=self._replays and not own, records=self._replays and own
            )
            for batch in batches
        ]
        closure = partial(self._loss_closure, trained)
        reports = self._run(batches, rows, closure, forward_only=False, force_all_reduce=on_every_replica)
        self.routing.keep(batches, rows)
        bad = [sample for report in reports for sample in report.non_finite]
        problem = describe_samples("loss or log-probability", bad, share)
        require_finite(problem or describe_gradients(self.ddp, share), self.device)
        return batches, reports

    def gather_parameters(self) -> None:
        """Makes this rank's parameters whole again. Call it after updates, before `tensors` or a checkpoint; with
        actor.overlap_param_gather a step leaves that to the next forward pass. Costs nothing when they are whole."""
        self.memory.load("params")
        gather_parameters(self.ddp)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What this rank holds, live, by canonical name; loads parameters that are offloaded. Not collective.

        Raises: McoreRLError when `gather_parameters` has not been called since the last update.
        """
        if not parameters_are_gathered(self.ddp):
            raise McoreRLError("parameters are not whole after an update: call gather_parameters on all ranks first")
        self.memory.load("params")
        return canonical_tensors(self.chunks)

    def export_plan(self) -> list[TensorPlan]:
        """Every HF tensor with the writers of its slices; the same on every rank. Not collective."""
        dtype = next(iter(self.tensors().values())).dtype
        return export_plan(bind(family_for(self.hf_config).rows(self.hf_config), self.hf_config, dtype), self.layout)

    def sync_plan(self) -> list[TensorPlan]:
        """The part of export_plan that engines load: without multi-token prediction. Not collective."""
        return [plan for plan in self.export_plan() if plan.group != "mtp"]

    def shutdown(self) -> None:
        """Leaves the process groups."""
        parallel.destroy()

    def _run(
        self,
        batches: list[MicroBatch],
        rows: list[Row],
        closure: Callable[[Any, MicroBatch], LossClosure],
        *,
        forward_only: bool,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; what the closures returned, on the last stage."""

        def forward_step(
            iterator: Iterator[tuple[MicroBatch, Row]], model: torch.nn.Module
        ) -> tuple[torch.Tensor, LossClosure]:
            batch, row = next(iterator)
            self.routers.enter(model, row)
            output = model(batch.tokens[None], None, None, packed_seq_params=batch.sequences, **self._forward_options)
            return output, closure(model, batch)

        iterators = [iter(zip(batches, rows, strict=True)) for _ in self.ddp]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.ddp if len(self.ddp) > 1 else self.ddp[0],
            num_microbatches=len(batches),
            # Only first guesses: with variable_seq_lengths the stages tell each other the real shapes.
            seq_length=self.config.actor.tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
        )

    def _token_weights(self, batches: list[MicroBatch]) -> tuple[float, float]:
        """1 / (trained tokens of the update), 1 / (tokens that it computes), padding excluded; of all ranks."""
        own = [sum(len(batch.targets) for batch in batches), sum(sum(batch.lengths) for batch in batches)]
        counts = torch.tensor(own, dtype=torch.int64, device=self.device)
        dist.all_reduce(counts, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        trained, computed = counts.tolist()
        # Context-parallel ranks share the tokens of a row, of which each counts all.
        return 1 / max(trained, 1), self.layout.cp / max(computed, 1)

    def _annotation_closure(self, model: torch.nn.Module, batch: MicroBatch) -> LossClosure:
        def closure(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            logp, _ = self.objective.logp(model, hidden, batch, compute_entropy=False)
            return logp.sum(), torch.tensor(0, dtype=torch.int), (batch, logp)

        return closure

    def _loss_closure(self, mtp_weight: float, model: torch.nn.Module, batch: MicroBatch) -> LossClosure:
        def closure(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            policy_is_old, row = self._policy_is_old, len(batch.tokens)
            policy = hidden[:row] if self.mtp else hidden
            loss, report = self.objective.evaluate(model, policy, batch, self.old_logp, policy_is_old=policy_is_old)
            if self.mtp:
                ahead, metrics = self.mtp.evaluate(model, hidden[row:], batch, mtp_weight)
                loss, report = loss + ahead, replace(report, metrics=report.metrics | metrics)
            return loss, torch.tensor(0, dtype=torch.int), report

        return closure


_CPU = torch.device("cpu")


def _hf_config(config: Config, *, speaks: bool) -> dict[str, Any]:
    """config.json, without multi-token-prediction layers that are not trained; `speaks`: say so when there are any."""
    directory, key = config.model.hf_path, "actor.mtp_loss_coefficient"
    try:
        hf_config = read_hf_config(directory)
        family_for(hf_config)
        mtp_layers = num_mtp_layers(hf_config)
    except ConversionError as error:
        raise ConfigError(f"model.hf_path={directory}: {error}") from error
    if config.actor.mtp_loss_coefficient:
        if not mtp_layers:
            raise ConfigError(
                f"{key}={config.actor.mtp_loss_coefficient}, but model.hf_path={directory} has no "
                f"multi-token-prediction layers (num_nextn_predict_layers); set {key} to 0"
            )
        return dict(hf_config)
    if mtp_layers and speaks:
        logger.warning(
            "model.hf_path=%s: multi-token prediction (num_nextn_predict_layers %d) is not trained; its tensors are "
            "left out of training, checkpoints and exports. %s above 0 trains it",
            directory,
            mtp_layers,
            key,
        )
    return without_mtp(hf_config)


def _later_samples(shares: Sequence[RankShare]) -> RankShare:
    """The samples of all shares that are not in the first, each once: further epochs repeat samples."""
    joined = {name: np.concatenate([getattr(share, name) for share in shares]) for name in vars(shares[0])}
    _, index = np.unique(joined["samples"], return_index=True)
    index = index[index >= len(shares[0].samples)]
    return replace(shares[0], **{name: values[index] for name, values in joined.items()})
