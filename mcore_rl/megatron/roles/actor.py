"""One rank of the policy under training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state

from mcore_rl.algorithms import advantage_options, estimator
from mcore_rl.algorithms.passes import passes_over_later_updates
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.models import base_is_reference, has_reference, uses_lora
from mcore_rl.config.rules.objective import trains_scores
from mcore_rl.config.rules.precision import FLOAT16, overflow_advice
from mcore_rl.config.rules.teacher import is_on_ranks
from mcore_rl.config.schema import Config
from mcore_rl.data.kept_steps.writers import TrajectoryWriter
from mcore_rl.megatron.lora.adapters import attach_adapters
from mcore_rl.megatron.lora.trained_weights import require_frozen
from mcore_rl.megatron.model.loading import fill_value_model, load_hf
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.value_model import ValueModel, train_head
from mcore_rl.megatron.optim.optimizer import updates_of_run
from mcore_rl.megatron.roles.moving_average import build_teachers, numbered_averages
from mcore_rl.megatron.roles.rank_model import join_and_build
from mcore_rl.megatron.roles.reference import BasePolicy, FrozenPolicy, whole_kl
from mcore_rl.megatron.roles.teacher import FrozenTeacher, hinted_samples, served_outputs
from mcore_rl.megatron.roles.whole_updates import WholeUpdates
from mcore_rl.megatron.step.distillation import TeacherOutputs
from mcore_rl.megatron.step.estimation import estimate_tokens
from mcore_rl.megatron.step.finite_check import describe_samples, require_finite
from mcore_rl.megatron.step.loss.rank_batch import RankBatch
from mcore_rl.megatron.step.loss.trained_tokens import by_sample
from mcore_rl.megatron.step.microbatches import MicroBatch, chosen_samples, distinct_samples, sequence_sums
from mcore_rl.megatron.step.mismatch import logp_gap, mismatch
from mcore_rl.megatron.step.objective import MicroBatchReport, Objective, non_finite_samples
from mcore_rl.megatron.step.replay import engine_routing
from mcore_rl.megatron.step.token_values import TokenValueWriter
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.types import (
    LogpGap,
    Mean,
    Metric,
    RankShare,
    ScoreColumn,
    SequenceSums,
    TrajectoryBuffers,
    merge_metrics,
)
from mcore_rl.weights.frozen import TrainedWeights
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.topology import Topology
from model_converters.hf.value_head import model_rows
from model_converters.mapping.placement import TensorPlan
from model_converters.mapping.plan import export_plan
from model_converters.mapping.separate import trainer_rows
from model_converters.mapping.table import bind

logger = logging.getLogger(__name__)


class MegatronActor(WholeUpdates):
    """The policy on one rank: model, optimizer, loss, and the reference of a KL term.

    With trainer.objective=reward_model it is a value model, whose scores have the place of log-probabilities
    (step/scores.py).

    `reference` is None without a KL term. `teachers` are the teachers on these ranks, in the order of
    TeacherConfig.entries. Passes over a batch take a RankBatch and return one with their results added.

    `init_method` is tcp://host:port of the process group to join, or None if this process has joined it already.

    Every token counts in the metrics of exactly one rank, so the metrics of all ranks can be merged exactly.

    Collective: every method, over all ranks.
    Raises: ConfigError for a model or layout that cannot be built.
    """

    def __init__(self, config: Config, rank: int, world_size: int, init_method: str | None) -> None:
        self.config, seed = config, config.run.seed
        role = ModelRole.policy(config.actor, config.model)
        scores = trains_scores(config)
        spec = (ResolvedModel.value_model if scores else ResolvedModel.policy)(role, world_size)
        if rank == 0 and spec.left_out:
            logger.warning(
                "model.hf_path=%s: multi-token prediction (num_nextn_predict_layers %d) is not trained; its tensors "
                "are left out of training, checkpoints and exports. actor.mtp_loss_coefficient above 0 trains it",
                config.model.hf_path,
                spec.left_out,
            )
        chunks = join_and_build(config, spec, rank, init_method, ValueModel if scores else PolicyModel)
        if scores:
            fill_value_model(chunks, role, spec.layout, seed)
        elif not role.model.random_init:
            load_hf(chunks, role.model.hf_path, spec.layout)
        if uses_lora(role.section):
            attach_adapters(chunks, role.section.lora, spec.hf_config, spec.layout, seed=seed)
            if scores:
                train_head(chunks)
        super().__init__(spec, chunks, num_updates=updates_of_run(config.trainer), seed=seed)
        self.objective = Objective.from_config(config, self.group, self.context)
        self.packing = replace(
            self.packing,
            observed=config.algorithm.observation_coefficient > 0,
            masked=self.objective.outputs.masked,
        )
        self.estimator = estimator(config.algorithm.advantage, **advantage_options(config.algorithm))
        # One data-parallel rank writes per-token values; its last stage has the log-probabilities.
        has_logp = self.counts_tokens and not self.place.dp and self.objective.needs.advantages
        self.token_values = TokenValueWriter.from_config(config, self.context) if has_logp else None
        # All ranks with the same data-parallel coordinate have the same trajectories.
        keeps = self.counts_tokens and not self.place.cp
        self.trajectories = TrajectoryWriter.from_config(config, self.place.dp) if keeps else None
        self.reference: FrozenPolicy | BasePolicy | None = None
        if has_reference(config):
            if base_is_reference(config.actor, config.reference):
                self.reference = BasePolicy(self, self.objective)
            else:
                gpus = config.cluster.gpus_per_node
                self.reference = FrozenPolicy(spec, config.reference, self.objective, chunks, gpus_per_node=gpus)
                self.saved_reference = self.reference if self.reference.is_saved else None
        self.teachers: list[FrozenTeacher] = []
        if is_on_ranks(config.teacher):
            self.teachers = build_teachers(config, spec, self.objective.outputs, self.tensors)
        self.averages = numbered_averages(self.teachers)

    def update_averages(self) -> None:
        """Average the policy's current weights into the teachers of teacher.moving_average, once per step. Call
        `gather_parameters` before. Not collective."""
        for average in self.averages.values():
            average.update(self.tensors())

    def compare(self, share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> dict[str, Metric]:
        """Measure how much the policy's log-probabilities differ from the recorded ones. Nothing is changed.

        Each token is compared at its recorded temperature, or at 1 if none is recorded, over the whole vocabulary.
        """
        plain = replace(self.objective.outputs, temperature=1.0, masked=False)
        return self._mismatch(self.infer(self.microbatches(share, chunks), plain.logp_of))

    def compare_logp(self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> list[LogpGap]:
        """Measure the difference between the policy's and the engine's log-probabilities for each share.

        With actor.moe.router_replay=engine the pass replays the engine's experts. No result is kept for later passes.
        """
        replays = self.config.actor.moe.router_replay == "engine"
        if replays:
            self.routing.impose(engine_routing(shares, chunks))
        passes = [self.infer(self.microbatches(share, chunks), self.objective.outputs.logp_of) for share in shares]
        own_routing = self.routing.num_experts > 0 and not replays
        return [logp_gap(found if self.counts_tokens else [], own_routing=own_routing) for found in passes]

    def recompute_logp(
        self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]
    ) -> tuple[RankBatch, dict[str, Metric]]:
        """Compute the old log-probabilities of the samples of all updates except the first.

        The first update starts from the current policy, so its own forward pass computes the log-probabilities of its
        samples and their metrics. The pass is skipped if nothing uses its results: the loss, the KL term of the
        rewards, or a replay of the policy's own routing. Returns the batch and metrics.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        if self.trajectories is not None:
            # Before any pass: a step whose loss is not finite can be repeated, too.
            self.trajectories.write(shares, chunks)
        # A single update runs on the old policy itself, so it has nothing to replay.
        replays = self.config.actor.moe.router_replay == "policy" and len(shares) > 1
        batch = RankBatch(shares, chunks, replays=replays)
        replay = self._impose_engine(batch) if self.config.actor.moe.router_replay == "engine" else {}
        needs_old_logp = self.objective.needs_old_logp
        if len(shares) == 1 or not passes_over_later_updates(self.config, needs_old_logp=needs_old_logp):
            return batch, replay
        # Without the samples of the first update, which computes their log-probabilities itself.
        share = distinct_samples(shares, first=1)
        microbatches = self.microbatches(share, chunks)
        rows = [self.routing.row(microbatch, records=replays) for microbatch in microbatches]
        logp_by_batch = self.infer(microbatches, self.objective.outputs.logp_of, rows)
        self.routing.keep(microbatches, rows)
        bad = [sample for microbatch, logp in logp_by_batch for sample in non_finite_samples(microbatch, logp)]
        self.require_finite_samples(self.objective.outputs.quantity, bad, share)
        return replace(batch, old_logp=by_sample(logp_by_batch)), replay | self._mismatch(logp_by_batch)

    def _mismatch(self, logp_by_batch: list[tuple[MicroBatch, torch.Tensor]]) -> dict[str, Metric]:
        return merge_metrics([mismatch(batch, logp) for batch, logp in logp_by_batch]) if self.counts_tokens else {}

    def _impose_engine(self, batch: RankBatch) -> dict[str, Metric]:
        """Replay the engine's experts in all later passes over the samples.

        Every actor.moe.replay_check_every_steps steps, also measure without replay how much the policy's experts and
        log-probabilities differ from the engine's. Steps are derived from the optimizer's counter, which survives a
        resume.
        """
        self.routing.impose(engine_routing(batch.shares, batch.chunks))
        every = self.config.actor.moe.replay_check_every_steps
        # One step of the run has len(shares) updates.
        if not every or self.scheduler.num_steps // len(batch.shares) % every:
            return {}
        microbatches = self.microbatches(distinct_samples(batch.shares), batch.chunks)
        # free: let the routers choose, and record the choice for the comparison.
        rows = [self.routing.row(microbatch, records=True, free=True) for microbatch in microbatches]
        gap = self._mismatch(self.infer(microbatches, self.objective.outputs.logp_of, rows))
        metrics = self.routing.differences(microbatches, rows)
        if gap:
            metrics["routing/logp_diff_mean_without_replay"] = gap["rollout/logp_diff_mean"]
        return metrics

    def sequence_logp(self, shares: Sequence[RankShare], chunks: Sequence[TrajectoryBuffers]) -> SequenceSums:
        """Sum the log-probabilities of every sample over its trained tokens, for the policy and for the reference, if
        the run has one. For a reward model, these sums are the scores of the samples. No result is kept for later
        passes. Ranks of other stages than the last get empty sums.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        share = distinct_samples(shares)
        microbatches = self.microbatches(share, chunks)
        found = self.infer(microbatches, self.objective.outputs.logp_of)
        bad = [sample for batch, logp in found for sample in non_finite_samples(batch, logp)]
        self.require_finite_samples(self.objective.outputs.quantity, bad, share)
        reference = None
        if self.reference is not None:
            ref_logp = self.reference.logp(share, chunks)
            last = microbatches if found else []
            joined = [
                (batch, torch.cat([ref_logp[sample] for sample in batch.samples])) for batch in last if batch.samples
            ]
            reference = sequence_sums(joined, self.context)
        return SequenceSums(sequence_sums(found, self.context), reference)

    def reference_logp(self, batch: RankBatch) -> RankBatch:
        """Add the reference's log-probabilities of all samples to the batch.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        assert self.reference is not None
        return replace(batch, ref_logp=self.reference.logp(distinct_samples(batch.shares), batch.chunks))

    def teacher_outputs(
        self, batch: RankBatch, teachers: np.ndarray | None = None, scores: Sequence[ScoreColumn] = ()
    ) -> RankBatch:
        """Add the teachers' outputs for all samples to the batch: `scores` of teachers in other processes, or results
        of the teachers on these ranks, which take turns.

        Shapes: teachers [B], see Batch.teachers; None: all samples have teacher 0.
        Raises: NonFiniteError on every rank, naming the samples.
        """
        share = distinct_samples(batch.shares)
        numbers = np.zeros(len(share.samples), np.int32) if teachers is None else teachers[share.samples]
        untaught = frozenset(share.samples[numbers < 0].tolist())
        # All ranks run the same teachers.
        used = {0} if teachers is None else set(teachers.tolist())
        parts = [
            teacher.outputs(chosen_samples(share, numbers == number), batch.chunks, number)
            for number, teacher in enumerate(self.teachers)
            if number in used
        ]
        if not self.teachers:
            parts = [self._served_outputs(chosen_samples(share, numbers >= 0), batch, scores)]
        return replace(batch, teacher=TeacherOutputs.joined(parts, untaught, hinted_samples(share, batch.chunks)))

    def _served_outputs(self, share: RankShare, batch: RankBatch, scores: Sequence[ScoreColumn]) -> TeacherOutputs:
        outputs = served_outputs(self.microbatches(share, batch.chunks), scores, self.context)
        finite = [outputs.logp, outputs.top_logp]
        bad = {sample for field in finite for sample, values in field.items() if not values.isfinite().all()}
        teacher = self.config.teacher
        in_float16 = teacher.num_engines and (teacher.dtype or self.config.model.dtype) == FLOAT16
        advice = overflow_advice("teacher.dtype") if in_float16 else ""
        require_finite(describe_samples("output of the teacher", bad, share), self.device, remedy=advice)
        return outputs

    def kl_penalties(self, batch: RankBatch, coefficient: float) -> tuple[RankBatch, dict[str, Metric]]:
        """Add the KL penalties of the rewards, between the old policy and the reference. Returns the batch and metrics.

        Call it with the result of `reference_logp`, before the updates. It runs the policy's forward pass over the
        first update's samples, which `recompute_logp` skips.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        every, first = distinct_samples(batch.shares), distinct_samples(batch.shares[:1])
        first_logp = self.infer(self.microbatches(first, batch.chunks), self.objective.outputs.logp_of)
        microbatches = self.microbatches(every, batch.chunks)
        kl: dict[int, np.ndarray] = {}
        if self.place.pp == self.layout.pp - 1:
            old_logp, kind = batch.old_logp | by_sample(first_logp), self.config.algorithm.kl.reward_kind
            kl = whole_kl(microbatches, old_logp, batch.ref_logp, kind, self.context)
        # Ranks of earlier stages have no values, but take part in the check.
        bad = [sample for sample, values in kl.items() if not np.isfinite(values).all()]
        self.require_finite_samples("KL", bad, every)
        penalties = {sample: (coefficient * values).astype(np.float32) for sample, values in kl.items()}
        metrics: dict[str, Metric] = {}
        if self.counts_tokens and not self.place.cp:
            total = sum(float(values.sum(dtype=np.float64)) for values in kl.values())
            metrics["reward/kl"] = Mean(total, sum(len(values) for values in kl.values()))
        return replace(batch, penalties=penalties), metrics

    def refresh_reference(self) -> None:
        """Copy the policy's current weights to the reference."""
        assert isinstance(self.reference, FrozenPolicy)
        self.gather_parameters()
        self.reference.copy_from(self.chunks)

    def estimate(
        self, batch: RankBatch, values: Mapping[int, np.ndarray] | None
    ) -> tuple[RankBatch, dict[str, Metric], dict[int, np.ndarray]]:
        """Compute the advantages of every token with the configured estimator.

        `values` are the critic's, for estimators that need them. An estimator that needs norms of scores takes a
        forward pass. Returns the batch with advantages, metrics, and on ranks of the last stage the returns.

        Shapes: values, returns float32 [n] by sample.
        Collective: the data-parallel ranks of the last stage; all ranks, if the estimator needs score_norms.
        Raises: NonFiniteError on every rank, naming the samples.
        """
        norms = self.score_norms(batch) if self.estimator.needs.score_norms else None
        if self.place.pp < self.layout.pp - 1:
            return batch, {}, {}
        estimates = estimate_tokens(
            self.estimator,
            distinct_samples(batch.shares),
            batch.chunks,
            values=values,
            penalties=batch.penalties or None,
            score_norms=norms,
            group=parallel_state.get_data_parallel_group(),
        )
        # All context-parallel ranks have the same whole responses; one of them counts the tokens.
        metrics = estimates.describe() if self.counts_tokens and not self.place.cp else {}
        return replace(batch, token_advantages=estimates.advantages), metrics, estimates.returns

    def update(self, batch: RankBatch, index: int) -> dict[str, Metric]:
        """Run one optimizer step on the samples of share `index`. All data-parallel ranks step together.

        Update 0 must start from the weights that `recompute_logp` used.

        Raises: NonFiniteError on every rank, naming the samples, with parameters, optimizer and schedule unchanged.
        """
        microbatches, reports = self.accumulate_gradients(batch, index)
        if self.token_values is not None and index == 0:
            self.token_values.write(batch.shares[0], batch.chunks, microbatches, batch.old_logp)
        return self._step(microbatches, reports, index)

    def accumulate_gradients(self, batch: RankBatch, index: int) -> tuple[list[MicroBatch], list[MicroBatchReport]]:
        """Compute the gradient of the loss of update `index`; see TrainedModel._accumulate.

        Raises: NonFiniteError on every rank.
        """
        share, policy_is_old = batch.shares[index], index == 0
        # The first update records the experts of its samples, which later epochs repeat; recompute_logp has
        # recorded the others.
        replays, records = batch.replays and not policy_is_old, batch.replays and policy_is_old
        microbatches = self.microbatches(share, batch.chunks)
        trained, routed = self.token_weights(microbatches)
        choices = self.choose_tokens(batch, index, microbatches, replays=replays)
        rows = [
            self.routing.row(microbatch, token_weight=routed, replays=replays, records=records)
            for microbatch in microbatches
        ]
        loss = partial(
            self.objective.evaluate,
            batch,
            policy_is_old=policy_is_old,
            choices=choices,
            mtp_weight=trained,
        )
        suspects = f"loss or {self.objective.outputs.quantity}"
        reports = self._accumulate(share, microbatches, rows, loss, suspects=suspects)
        self.routing.keep(microbatches, rows)
        return microbatches, reports

    def export_plan(self) -> list[TensorPlan]:
        """List every HF tensor with the ranks that write its slices. Equal on all ranks; not collective."""
        rows = trainer_rows(model_rows(self.hf_config, has_value_head=self.objective.needs.scores), self.layout)
        return export_plan(bind(rows, self.hf_config, self._dtype), self.layout)

    def sync_plan(self, engine: EngineLayout, topology: Topology, bucket_bytes: int, num_slots: int) -> SyncPlan:
        """Plan the transfer of the policy's weights to engines. Not collective."""
        trained = TrainedWeights.of(self.config.actor)
        sizes = bucket_bytes, num_slots
        return SyncPlan(self.hf_config, self._dtype, self.layout, engine, topology, *sizes, trained=trained)

    def require_frozen(self, plan: SyncPlan) -> None:
        """Check that this rank trains no weight that the plan sends only once. Not collective.

        Raises: McoreRLError naming weights.
        """
        require_frozen(self.chunks, plan.frozen_parameters)

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of exported weights: the dtype in which layers use the parameters."""
        return self.chunks[0].config.params_dtype
