"""The teacher on one rank: a frozen model of any supported family, in the process groups of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mcore_rl.config.models import TeacherConfig, TeacherSourceConfig
from mcore_rl.data.trajectories import after_hints, has_hint
from mcore_rl.megatron.checkpoint.restore import load_weights
from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.model.loading import load_hf
from mcore_rl.megatron.model.model import build_model
from mcore_rl.megatron.model.output import output_weight
from mcore_rl.megatron.roles.rank_model import FrozenModel
from mcore_rl.megatron.step.distillation import Distillation, TeacherOutputs
from mcore_rl.megatron.step.loss.trained_tokens import samples_and_positions
from mcore_rl.megatron.step.microbatches import MicroBatch, build_microbatches
from mcore_rl.megatron.step.objective import Objective, non_finite_samples
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.teacher import resolved_teacher
from mcore_rl.types import RankShare, ScoreColumn, TrajectoryBuffers

Fields = dict[str, torch.Tensor]
"""Outputs of one micro-batch by field of TeacherOutputs."""
HostFields = tuple[MicroBatch, Fields, tuple[int, ...]]
"""Outputs of one micro-batch in host memory, and the samples with a value that is not finite."""


class FrozenTeacher(FrozenModel):
    """A teacher of teacher.hf_path or teacher.by_source, which computes its probabilities of the policy's responses.

    With teacher.offload, `memory` keeps the weights in host memory between passes. It is loaded again when a run
    resumes, so checkpoints do not contain it. MovingAverage has weights of its own.

    Collective: every method, over all ranks.
    Raises: ConfigError, naming the teacher's key, for a model that does not fit the policy's ranks, or its weights.
    """

    def __init__(
        self,
        section: TeacherConfig,
        entry: TeacherSourceConfig,
        policy: ResolvedModel,
        objective: Objective,
        *,
        gpus_per_node: int,
    ) -> None:
        spec = resolved_teacher(section, entry, policy)
        chunks = build_model(spec, gpus_per_node=gpus_per_node)
        if entry.hf_path is not None:
            load_hf(chunks, entry.directory, spec.layout, entry.chosen)
        super().__init__(spec, chunks, offload=section.offload, name="teacher")
        if entry.checkpoint is not None:
            # Now: blocks of a checkpoint are blocks of the shards that FSDP has made.
            load_weights(entry.checkpoint, chunks, entry.chosen)
        self.section, self.objective, self.terms = section, objective, Distillation(section)
        self._weight: torch.Tensor | None = None
        self._places: Mapping[int, torch.Tensor] = {}
        self.memory.offload()

    def outputs(self, share: RankShare, chunks: Sequence[TrajectoryBuffers], number: int = 0) -> TeacherOutputs:
        """Compute what the terms of the objective read, at the temperature of each token. number: of this teacher.

        A trajectory with a hint is computed after its prompt with the hint. Its tokens may then belong to other
        context-parallel ranks than in the policy's micro-batches; the outputs are the policy's.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        hinted = any(chunk.hint_tokens is not None for chunk in chunks)
        self._places = self._policy_places(share, chunks) if hinted and self.context.size > 1 else {}
        batches = self.microbatches(*replace_prompts(share, chunks)) if hinted else self.microbatches(share, chunks)
        found = self.infer(batches, self._host_fields)
        bad = [sample for _, _, samples in found for sample in samples]
        self.require_finite_samples("output of the teacher", bad, share)
        self.memory.offload()
        names = dict.fromkeys(name for _, fields, _ in found for name in fields)
        columns = {
            name: {s: part for batch, fields, _ in found for s, part in self._split_by_sample(batch, fields[name])}
            for name in names
        }
        return TeacherOutputs(
            columns.get("logp", {}),
            columns.get("hidden", {}),
            columns.get("top_ids", {}),
            columns.get("top_logp", {}),
            weights={} if self._weight is None else {number: self._weight},
            teachers=dict.fromkeys(share.samples.tolist(), number),
        )

    def _policy_places(self, share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> dict[int, torch.Tensor]:
        """Return trained_places of the policy's micro-batches. Not collective: data-parallel ranks without
        trajectories do not know whether there are hints. The places do not depend on the division into rows."""
        alone = replace(self.packing, group=None, device="cpu")
        return trained_places(build_microbatches(share, chunks, alone), self.context)

    def _split_by_sample(self, batch: MicroBatch, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Split the values of a micro-batch by sample, in the order of the policy's tokens."""
        counts = [len(self._places[s]) for s in batch.samples] if self._places else list(batch.trained_counts)
        return zip(batch.samples, values.split(counts), strict=True)

    def _host_fields(self, chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor) -> HostFields:
        fields = self._fields(chunk, batch, hidden)
        bad = [sample for values in fields.values() for sample in _bad(batch, values)]
        if self._places and len(batch.owners):
            fields = {name: self._moved(batch, values) for name, values in fields.items()}
        # Now, because the hidden states of a whole step do not fit on the device.
        return batch, {name: values.cpu() for name, values in fields.items()}, tuple(bad)

    def _moved(self, batch: MicroBatch, values: torch.Tensor) -> torch.Tensor:
        """Exchange the values of a micro-batch with hints for the values of the policy's tokens on this rank.

        Collective: the context-parallel group.
        """
        rows = values[:, None] if values.dim() == 1 else values
        whole = self.context.gather(rows.t(), batch.owners).t().split(list(batch.whole_counts))
        own = torch.cat([part[self._places[s].to(part.device)] for s, part in zip(batch.samples, whole, strict=True)])
        return own.reshape(-1, *values.shape[1:])

    def _fields(self, chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor) -> Fields:
        states, terms = hidden.index_select(0, batch.predictors), self.terms
        fields: Fields = {}
        if terms.in_advantage:
            fields["logp"] = self.objective.outputs.logp_of(chunk, batch, hidden)[1]
        if not terms.in_loss:
            return fields
        projection = self.objective.outputs.projection(chunk, batch)
        if self.section.top_k:
            fields["top_ids"], fields["top_logp"] = terms.top_tokens(states, projection)
        else:
            fields["hidden"] = states
            # A copy, because the model's own is in host memory, or a shard, when updates need it.
            self._weight = output_weight(chunk).detach().clone() if self._weight is None else self._weight
        return fields


def served_outputs(
    batches: Sequence[MicroBatch], columns: Sequence[ScoreColumn], context: ContextPart
) -> TeacherOutputs:
    """Select this rank's tokens from the scores of teachers on engines or servers. Other fields of columns are left
    out."""
    scores = {sample: found for column in columns for sample, found in column.by_sample().items()}
    fields: dict[str, dict[int, torch.Tensor]] = {"logp": {}, "top_ids": {}, "top_logp": {}}
    # A sample without scores is found when an update reads it.
    for sample, own in trained_places(batches, context).items():
        for name, of_sample in fields.items():
            if sample in scores and (values := getattr(scores[sample], name)) is not None:
                of_sample[sample] = torch.from_numpy(values)[own]
    return TeacherOutputs(fields["logp"], top_ids=fields["top_ids"], top_logp=fields["top_logp"])


def trained_places(batches: Sequence[MicroBatch], context: ContextPart) -> dict[int, torch.Tensor]:
    """Return the positions of this rank's trained tokens among all trained tokens of their sample: int64 [n]."""
    places: dict[int, torch.Tensor] = {}
    for batch in batches:
        _, positions = samples_and_positions(batch, context)
        places |= zip(batch.samples, positions.cpu().split(list(batch.trained_counts)), strict=True)
    return places


def replace_prompts(share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> tuple[RankShare, list[TrajectoryBuffers]]:
    """Replace the prompts of a share's trajectories by their prompts with hints."""
    others = [after_hints(chunk) for chunk in chunks]
    lengths = [np.diff(other.token_offsets) for other in others]
    pairs = zip(share.chunk_ids.tolist(), share.rows.tolist(), strict=True)
    total = np.array([lengths[chunk][row] for chunk, row in pairs], np.int32)
    return replace(share, total_tokens=total), others


def hinted_samples(share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> frozenset[int] | None:
    """Return the samples of a share with a hint; None if hints were not read."""
    if all(chunk.hint_tokens is None for chunk in chunks):
        return None
    with_hint = [has_hint(chunk) for chunk in chunks]
    places = zip(share.samples.tolist(), share.chunk_ids.tolist(), share.rows.tolist(), strict=True)
    return frozenset(sample for sample, chunk, row in places if with_hint[chunk][row])


def _bad(batch: MicroBatch, values: torch.Tensor) -> tuple[int, ...]:
    return non_finite_samples(batch, values if values.dim() == 1 else values.t())
