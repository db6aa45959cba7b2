"""The teacher on one rank: a frozen model of any supported family, in the process groups of the policy or in groups of
its own."""

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
from mcore_rl.megatron.roles.rank_model import Evaluate, FrozenModel
from mcore_rl.megatron.step.distillation import Distillation, TeacherOutputs
from mcore_rl.megatron.step.loss.trained_tokens import samples_and_positions
from mcore_rl.megatron.step.microbatches import MicroBatch, build_microbatches
from mcore_rl.megatron.step.objective import non_finite_samples
from mcore_rl.megatron.step.outputs import TokenOutputs
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.types import RankShare, ScoreColumn, TrajectoryBuffers

Fields = dict[str, torch.Tensor]
"""Outputs of one micro-batch by field of TeacherOutputs."""
HostFields = tuple[MicroBatch, Fields, tuple[int, ...]]
"""Outputs of one micro-batch in host memory, and the samples with a value that is not finite."""


class FrozenTeacher(FrozenModel):
    """A teacher of teacher.hf_path or teacher.by_source, which computes its probabilities of the policy's responses.

    With teacher.offload, `memory` keeps the weights in host memory between passes. It is loaded again when a run
    resumes, so checkpoints do not contain it. MovingAverage has weights of its own.

    Collective: every method, over all ranks of `spec`, which have joined their process groups.
    Raises: ConfigError, naming the teacher's key, for weights that do not fit the model.
    """

    def __init__(
        self,
        section: TeacherConfig,
        entry: TeacherSourceConfig,
        spec: ResolvedModel,
        outputs: TokenOutputs,
        *,
        gpus_per_node: int,
    ) -> None:
        chunks = build_model(spec, gpus_per_node=gpus_per_node)
        if entry.hf_path is not None:
            load_hf(chunks, entry.directory, spec.layout, entry.chosen)
        super().__init__(spec, chunks, offload=section.offload, name="teacher")
        if entry.checkpoint is not None:
            # Now: blocks of a checkpoint are blocks of the shards that FSDP has made.
            load_weights(entry.checkpoint, chunks, entry.chosen)
        self.section, self.token_outputs, self.terms = section, outputs, Distillation(section)
        self._weight: torch.Tensor | None = None
        self._places: Mapping[int, torch.Tensor] = {}
        self.memory.offload()

    def outputs(self, share: RankShare, chunks: Sequence[TrajectoryBuffers], number: int = 0) -> TeacherOutputs:
        """Compute what the terms of the objective read, at the temperature of each token. number: of this teacher.

        A trajectory with a hint is computed after its prompt with the hint. Its tokens may then belong to other
        context-parallel ranks than in the policy's micro-batches; the outputs are the policy's.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        hinted = is_hinted(chunks)
        self._places = self._policy_places(share, chunks) if hinted and self.context.size > 1 else {}
        found = self._passed(share, chunks, self._host_fields)
        names = dict.fromkeys(name for _, fields in found for name in fields)
        columns = {
            name: {s: part for batch, fields in found for s, part in self._split_by_sample(batch, fields[name])}
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

    def _passed(
        self, share: RankShare, chunks: Sequence[TrajectoryBuffers], evaluate: Evaluate[HostFields]
    ) -> list[tuple[MicroBatch, Fields]]:
        """Run the forward pass over a share, after the prompts with hints if there are any.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        batches = self.microbatches(*(replace_prompts(share, chunks) if is_hinted(chunks) else (share, chunks)))
        found = self.infer(batches, evaluate)
        bad = [sample for _, _, samples in found for sample in samples]
        self.require_finite_samples("output of the teacher", bad, share)
        self.memory.offload()
        return [(batch, fields) for batch, fields, _ in found]

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
        bad = [sample for values in fields.values() for sample in bad_samples(batch, values)]
        if self._places and len(batch.owners):
            fields = {name: self._moved(batch, values) for name, values in fields.items()}
        # Now, because the hidden states of a whole step do not fit on the device.
        return batch, {name: values.cpu() for name, values in fields.items()}, tuple(bad)

    def _moved(self, batch: MicroBatch, values: torch.Tensor) -> torch.Tensor:
        """Exchange the values of a micro-batch with hints for the values of the policy's tokens on this rank.

        Collective: the context-parallel group.
        """
        whole = whole_values(batch, values, self.context).split(list(batch.whole_counts))
        return torch.cat([part[self._places[s].to(part.device)] for s, part in zip(batch.samples, whole, strict=True)])

    def _fields(self, chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor, *, logp: bool = False) -> Fields:
        """Compute what the terms read. With `logp`, log-probabilities of the sampled tokens are among it."""
        states, terms = hidden.index_select(0, batch.predictors), self.terms
        fields: Fields = {}
        if terms.in_advantage or logp:
            fields["logp"] = self.token_outputs.logp_of(chunk, batch, hidden)[1]
        if not terms.in_loss:
            return fields
        projection = self.token_outputs.projection(chunk, batch)
        if self.section.top_k:
            fields["top_ids"], fields["top_logp"] = terms.top_tokens(states, projection)
        else:
            fields["hidden"] = states
            # A copy, because the model's own is in host memory, or a shard, when updates need it.
            self._weight = output_weight(chunk).detach().clone() if self._weight is None else self._weight
        return fields


def whole_values(batch: MicroBatch, values: torch.Tensor, context: ContextPart) -> torch.Tensor:
    """Gather the values of all trained tokens of a micro-batch from the context-parallel ranks.

    Shapes: values [N] or [N, k] of this rank's trained tokens -> [M] or [M, k].
    Collective: the context-parallel group.
    """
    if context.size == 1 or not len(batch.owners):
        return values
    rows = values[:, None] if values.dim() == 1 else values
    return context.gather(rows.t(), batch.owners).t().reshape(-1, *values.shape[1:])


def served_outputs(
    batches: Sequence[MicroBatch], columns: Sequence[ScoreColumn], context: ContextPart
) -> TeacherOutputs:
    """Select this rank's tokens from the scores of teachers on engines, servers or ranks of their own. Other fields of
    columns are left out."""
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


def is_hinted(chunks: Sequence[TrajectoryBuffers]) -> bool:
    """Return True if trajectories have hints. Data-parallel ranks without trajectories do not know it."""
    return any(chunk.hint_tokens is not None for chunk in chunks)


def hinted_samples(share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> frozenset[int] | None:
    """Return the samples of a share with a hint; None if hints were not read."""
    if not is_hinted(chunks):
        return None
    with_hint = [has_hint(chunk) for chunk in chunks]
    places = zip(share.samples.tolist(), share.chunk_ids.tolist(), share.rows.tolist(), strict=True)
    return frozenset(sample for sample, chunk, row in places if with_hint[chunk][row])


def bad_samples(batch: MicroBatch, values: torch.Tensor) -> tuple[int, ...]:
    """Return the samples with a value that is not finite. Shapes: values [N] or [N, k]."""
    return non_finite_samples(batch, values if values.dim() == 1 else values.t())
