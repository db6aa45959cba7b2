"""The teacher on one of its own ranks, in a layout other than the policy's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state

from mcore_rl.config.schema import Config
from mcore_rl.megatron.roles.rank_model import join
from mcore_rl.megatron.roles.teacher import FrozenTeacher, HostFields, bad_samples, whole_values
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.megatron.step.outputs import TokenOutputs
from mcore_rl.resolved.teacher import teacher_on_own_ranks
from mcore_rl.types import RankShare, TokenScores, TrajectoryBuffers


class MegatronTeacher(FrozenTeacher):
    """The teacher of entry `number` of TeacherConfig.entries in the layout of teacher.parallel.

    `init_method` is like MegatronActor's. `reports` is true on one rank per data-parallel rank.

    Collective: every method, over all ranks of this teacher.
    Raises: ConfigError, naming `teacher` keys, for a model or layout that cannot be built.
    """

    def __init__(self, config: Config, number: int, rank: int, world_size: int, init_method: str | None) -> None:
        teacher, entry = config.teacher, config.teacher.entries[number]
        spec = teacher_on_own_ranks(config, entry)
        assert spec.layout.world_size == world_size
        join(config, spec, rank, init_method)
        # The policy's responses are sampled from all tokens (config/rules/teacher.py), at their own temperatures.
        outputs = TokenOutputs(
            config.rollout.temperature,
            parallel_state.get_tensor_model_parallel_group() if spec.layout.tp > 1 else None,
            spec.role.section.logprob_chunk_tokens,
            float32_head=spec.role.model.float32_head,
        )
        super().__init__(teacher, entry, spec, outputs, gpus_per_node=config.cluster.gpus_per_node)
        self.reports = self.counts_tokens and not self.place.cp

    def scores(self, share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> dict[int, TokenScores]:
        """Compute the log-probabilities of all trained tokens of every sample, at the temperature of each token, and
        the most probable tokens with teacher.top_k. Trajectories with a hint are computed after their prompt with the
        hint. Ranks of other stages than the last get {}.

        Raises: NonFiniteError on every rank, naming the samples.
        """
        scores: dict[int, TokenScores] = {}
        for batch, fields in self._passed(share, chunks, self._whole_fields):
            counts = list(batch.whole_counts)
            columns = {name: [part.numpy() for part in values.split(counts)] for name, values in fields.items()}
            for index, sample in enumerate(batch.samples):
                scores[sample] = TokenScores(**{name: parts[index] for name, parts in columns.items()})
        return scores

    def _whole_fields(self, chunk: torch.nn.Module, batch: MicroBatch, hidden: torch.Tensor) -> HostFields:
        # Scores have log-probabilities even if no term reads them; their cost is small beside the layers.
        fields = self._fields(chunk, batch, hidden, logp=True)
        whole = {name: whole_values(batch, values, self.context).cpu() for name, values in fields.items()}
        bad = [sample for values in fields.values() for sample in bad_samples(batch, values)]
        return batch, whole, tuple(bad)
