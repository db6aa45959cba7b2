"""One rank of the policy under training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.interface import Estimator
from mcore_rl.config.lora import base_is_reference, uses_lora
from mcore_rl.config.reference import uses_reference
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.megatron import cpu, parallel
from mcore_rl.megatron.estimation import estimate_tokens
from mcore_rl.megatron.finite import describe_samples, require_finite
from mcore_rl.megatron.layout import train_layout
from mcore_rl.megatron.loading import load_hf
from mcore_rl.megatron.lora.weights import attach_adapters
from mcore_rl.megatron.microbatches import MicroBatch, by_sample, distinct_samples, own_tokens
from mcore_rl.megatron.model import build_model
from mcore_rl.megatron.mtp import MTPObjective
from mcore_rl.megatron.objective import MicroBatchReport, Objective, mismatch, non_finite_samples
from mcore_rl.megatron.offload import Offloader
from mcore_rl.megatron.output import PolicyModel
from mcore_rl.megatron.rank_model import LossClosure, join_ranks, loss_closure
from mcore_rl.megatron.reference import BasePolicy, FrozenPolicy, whole_kl
from mcore_rl.megatron.replay import engine_routing
from mcore_rl.megatron.trained_model import TrainedModel
from mcore_rl.types import Mean, Metric, RankShare, TrajectoryBuffers, merge_metrics
from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.hf_config import read_hf_config
from model_converters.layout import TrainLayout
from model_converters.mtp import num_mtp_layers, without_mtp
from model_converters.placement import TensorPlan
from model_converters.plan import export_plan
from model_converters.table import bind

cpu.install()

from megatron.core import parallel_state  # noqa: E402

logger = logging.getLogger(__name__)


class MegatronActor:
    """Builds the policy in its layout and trains it. Every method is collective over all ranks.

    `trained` is the model with its optimizer, of which the actor shows the parts by their names. `old_logp` maps a
    sample to the annotated log-probabilities of its trained tokens, on the ranks of the last stage; each
    context-parallel rank has those of its own part of the sequence. So does `ref_logp` with those of the `reference`,
    where the configuration has a KL term; `penalties` maps it to what the KL takes off the rewards of all its tokens.

    `init_method` is tcp://host:port of the process group to join; None: this process is in one already.

    Every token is counted in the metrics of exactly one rank, so merging those of all ranks is exact.

    Raises: ConfigError for a model or layout that cannot be built.
    """

    def __init__(self, config: Config, rank: int, world_size: int, init_method: str | None) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.hf_config = _hf_config(config, speaks=rank == 0)
        self.layout = train_layout(config.actor.parallel, world_size, self.hf_config)
        join_ranks(config, self.layout, rank, init_method)
        self.chunks = policy_chunks(config, self.hf_config, self.layout)
        self.trained = TrainedModel(config, self.hf_config, self.layout, rank, role="actor", chunks=self.chunks)
        self.model = self.trained.model
        self.ddp, self.optimizer, self.scheduler = self.trained.ddp, self.trained.optimizer, self.trained.scheduler
        self.routers, self.routing = self.model.routers, self.model.routing
        self.objective = Objective.from_config(config, self.model.group, self.model.context)
        self.mtp: MTPObjective | None = None
        if config.actor.mtp_loss_coefficient:
            chunk_tokens = config.actor.logprob_chunk_tokens
            self.mtp = MTPObjective(config.actor.mtp_loss_coefficient, chunk_tokens, self.model.group)
        self.old_logp: dict[int, torch.Tensor] = {}
        self.token_advantages: dict[int, np.ndarray] = {}
        self.reference = self._reference() if uses_reference(config) else None
        self.ref_logp: dict[int, torch.Tensor] = {}
        self.penalties: dict[int, np.ndarray] = {}
        self._chosen: dict[int, torch.Tensor] = {}
        self._policy_is_old = self._replays = False

    @property
    def memory(self) -> Offloader:
        return self.trained.memory

    def compare(self, share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> dict[str, Metric]:
        """How far the policy's log-probabilities, at temperature 1, are from those that came with the samples; nothing
        is kept of it."""
        self.memory.load("params")
        plain = replace(self.objective, temperature=1.0)

        def logp(chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor) -> tuple[MicroBatch, torch.Tensor]:
            return batch, plain.logp(chunk, hidden, batch, compute_entropy=False)[0]

        return self._mismatch(self.model.infer(self.model.microbatches(share, chunks), logp))

    def annotate(self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> dict[str, Metric]:
        """Recomputes the log-probabilities of the current policy for the samples of all updates but the first, once
        each. They stay on the ranks of the last stage until the next call.

        The first update starts from the very policy that they are of: its own forward pass gives those of its samples,
        and its metrics then hold what annotation would have found of them. There is no pass at all where nothing reads
        what it would find: neither the loss, nor the KL of the rewards, nor a replay of the policy's own routing.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        self.old_logp, self.token_advantages, self._policy_is_old = {}, {}, True
        # A single update is of the old policy throughout: its routing is its own.
        self._replays = self.config.actor.moe.router_replay == "policy" and len(shares) > 1
        replay = self._impose_engine(shares, chunks) if self.config.actor.moe.router_replay == "engine" else {}
        reads = self.objective.needs_old_logp or self.config.algorithm.kl.in_reward > 0 or self._replays
        if len(shares) == 1 or not reads:
            return replay
        self.memory.load("params")
        share = distinct_samples(shares, first=1)
        batches = self.model.microbatches(share, chunks)
        rows = [self.routing.row(batch, records=self._replays) for batch in batches]
        found = self.model.infer(batches, self._annotation, rows)
        self.routing.keep(batches, rows)
        self.old_logp = by_sample(found)
        bad = [sample for batch, logp in found for sample in non_finite_samples(batch, logp)]
        require_finite(describe_samples("log-probability", bad, share), self.model.device)
        return replay | self._mismatch(found)

    def _mismatch(self, found: list[tuple[MicroBatch, torch.Tensor]]) -> dict[str, Metric]:
        return merge_metrics([mismatch(batch, logp) for batch, logp in found]) if self.model.counts_tokens else {}

    def _impose_engine(self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> dict[str, Metric]:
        """From now on the samples take the experts that the engine chose. When it is due, also a pass without: how far
        its experts are from the engine's, and its log-probabilities from those sampled with.

        Steps are counted by the optimizer's, which a resumed run knows.
        """
        self.routing.impose(engine_routing(shares, chunks))
        every = self.config.actor.moe.replay_check_every_steps
        if not every or self.scheduler.num_steps // len(shares) % every:
            return {}
        self.memory.load("params")
        batches = self.model.microbatches(distinct_samples(shares), chunks)
        rows = [self.routing.row(batch, records=True, free=True) for batch in batches]
        gap = self._mismatch(self.model.infer(batches, self._annotation, rows))
        metrics = self.routing.differences(batches, rows)
        if gap:
            metrics["routing/logp_diff_mean_without_replay"] = gap["rollout/logp_diff_mean"]
        return metrics

    def refer(self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> None:
        """Log-probabilities of the reference for all samples, which stay here until the next call.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        assert self.reference is not None
        self.ref_logp, self.penalties = self.reference.logp(distinct_samples(shares), chunks), {}

    def penalize(
        self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers], coefficient: float
    ) -> tuple[dict[str, Metric], dict[int, float]]:
        """What the KL between the old policy and the reference takes off the rewards, after `annotate` and `refer`,
        before the updates: token by token for `estimate`, and the sum over each response, which is returned on the
        ranks of the last stage.

        The policy's pass over the samples of the first update, which annotation leaves out, is made here.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        assert self._policy_is_old
        self.memory.load("params")
        every, first = distinct_samples(shares), distinct_samples(shares[:1])
        found = self.model.infer(self.model.microbatches(first, chunks), self._annotation)
        batches = self.model.microbatches(every, chunks)
        kl: dict[int, np.ndarray] = {}
        place = self.layout.coordinates(self.rank)
        if place.pp == self.layout.pp - 1:
            old_logp = self.old_logp | by_sample(found)
            kl = whole_kl(batches, old_logp, self.ref_logp, self.config.algorithm.kl.reward_kind, self.model.context)
        bad = [sample for sample, values in kl.items() if not np.isfinite(values).all()]
        require_finite(describe_samples("KL", bad, every), self.model.device)
        self.penalties = {sample: (coefficient * values).astype(np.float32) for sample, values in kl.items()}
        sums = {sample: float(values.sum(dtype=np.float64)) for sample, values in self.penalties.items()}
        if not self.model.counts_tokens or place.cp:
            return {}, sums
        total = sum(float(values.sum(dtype=np.float64)) for values in kl.values())
        return {"reward/kl": Mean(total, sum(len(values) for values in kl.values()))}, sums

    def refresh_reference(self) -> None:
        """The reference becomes the policy of now."""
        assert isinstance(self.reference, FrozenPolicy)
        self.gather_parameters()
        self.reference.copy_from(self.chunks)

    def estimate(
        self,
        estimator: Estimator,
        shares: Sequence[RankShare],
        chunks: Sequence[TrajectoryBuffers],
        values: Mapping[int, np.ndarray] | None,
    ) -> tuple[dict[str, Metric], dict[int, np.ndarray]]:
        """Advantages of all samples token by token, for the updates that follow an `annotate`; `values` are a critic's,
        if the estimator reads any. Returns metrics, and on ranks of the last stage the returns.

        Shapes: values, returns float32 [n] by sample.
        Collective: the data-parallel ranks of the last stage.
        """
        place = self.layout.coordinates(self.rank)
        if place.pp < self.layout.pp - 1:
            return {}, {}
        found = estimate_tokens(
            estimator,
            distinct_samples(shares),
            chunks,
            values=values,
            penalties=self.penalties or None,
            group=parallel_state.get_data_parallel_group(),
        )
        self.token_advantages = found.advantages
        # Context-parallel ranks have the same whole responses, of which one counts the tokens.
        return found.describe() if self.model.counts_tokens and not place.cp else {}, found.returns

    def update(self, share: RankShare, chunks: Sequence[TrajectoryBuffers], update_index: int) -> dict[str, Metric]:
        """One optimizer step on the share's samples, together with the other data-parallel ranks on theirs.

        Raises: NonFiniteError on every rank, naming the samples, with parameters, optimizer and schedule untouched.
        """
        batches, reports = self.accumulate_gradients(share, chunks)
        self._policy_is_old = False
        return self.trained.step(batches, reports, update_index)

    def accumulate_gradients(
        self, share: RankShare, chunks: Sequence[TrajectoryBuffers], *, on_every_replica: bool = False
    ) -> tuple[list[MicroBatch], list[MicroBatchReport]]:
        """The gradient of the update's loss, as TrainedModel.accumulate_gradients leaves it.

        Raises: NonFiniteError on every rank.
        """
        batches = self.model.microbatches(share, chunks)
        trained, routed = self.model.token_weights(batches)
        if self.objective.loss.needs.selection:
            self._chosen = self._choose_tokens(batches)
        own = self._policy_is_old
        rows = [
            self.routing.row(
                batch, token_weight=routed, replays=self._replays and not own, records=self._replays and own
            )
            for batch in batches
        ]
        reports = self.trained.accumulate_gradients(
            share,
            batches,
            rows,
            partial(self._loss_closure, trained),
            suspects="loss or log-probability",
            on_every_replica=on_every_replica,
        )
        self.routing.keep(batches, rows)
        return batches, reports

    def gather_parameters(self) -> None:
        """As TrainedModel.gather_parameters."""
        self.trained.gather_parameters()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """As TrainedModel.tensors."""
        return self.trained.tensors()

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

    def _reference(self) -> FrozenPolicy | BasePolicy:
        if base_is_reference(self.config):
            return BasePolicy(self.model, self.memory, self.objective)
        frozen = FrozenPolicy(
            self.config, self.hf_config, self.layout, self.rank, objective=self.objective, policy=self.chunks
        )
        self.trained.reference = frozen if frozen.is_saved else None
        return frozen

    def _choose_tokens(self, batches: list[MicroBatch]) -> dict[int, torch.Tensor]:
        """Of an update that is about to begin; a forward pass of its own.

        Collective: all ranks.
        """
        self.memory.load("params")
        replays = self._replays and not self._policy_is_old
        rows = [self.routing.row(batch, replays=replays) for batch in batches]
        found = self.model.infer(batches, self._annotation, rows)
        if not found:
            return {}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)

        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(tensor, group=group)
            return tensor

        seed = self.config.run.seed + 1_000_003 * self.scheduler.num_steps  # another for every update
        return self.objective.choose_tokens(
            found, self.old_logp, self.token_advantages, seed=seed, all_reduce=all_reduce
        )

    def _annotation(
        self, chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor
    ) -> tuple[MicroBatch, torch.Tensor]:
        return batch, self.objective.logp(chunk, hidden, batch, compute_entropy=False)[0]

    def _loss_closure(self, mtp_weight: float, model: torch.nn.Module, batch: MicroBatch) -> LossClosure:
        def evaluate(hidden: torch.Tensor) -> tuple[torch.Tensor, MicroBatchReport]:
            policy_is_old, row = self._policy_is_old, len(batch.tokens)
            policy = hidden[:row] if self.mtp else hidden
            advantages = chosen = None
            if self.token_advantages:
                advantages = own_tokens(batch, self.token_advantages, self.model.context, "advantages")
            if self.objective.loss.needs.selection:
                none = batch.targets.new_empty(0).bool()
                chosen = torch.cat([none, *(self._chosen[sample] for sample in batch.samples)])
            loss, report = self.objective.evaluate(
                model,
                policy,
                batch,
                self.old_logp,
                policy_is_old=policy_is_old,
                advantages=advantages,
                chosen=chosen,
                ref_logp=self.ref_logp,
            )
            if self.mtp:
                ahead, metrics = self.mtp.evaluate(model, hidden[row:], batch, mtp_weight)
                loss, report = loss + ahead, replace(report, metrics=report.metrics | metrics)
            return loss, report

        return loss_closure(evaluate)


def policy_chunks(config: Config, hf_config: dict[str, Any], layout: TrainLayout) -> list[PolicyModel]:
    """This rank's chunks of the policy, with the weights of model.hf_path unless model.random_init, and adapters.

    Raises: ConfigError.
    Collective: all ranks, after join_ranks.
    """
    nodes = config.cluster.gpus_per_node
    chunks = build_model(hf_config, config.actor, config.model, layout, gpus_per_node=nodes)
    if not config.model.random_init:
        load_hf(chunks, config.model.hf_path, layout)
    if uses_lora(config.actor):
        attach_adapters(chunks, config.actor.lora, hf_config, layout, seed=config.run.seed)
    return chunks


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
