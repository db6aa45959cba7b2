"""The reward model on one rank: a frozen value model. The value of the last token is the response's score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import Config
from mcore_rl.data.supervised.targets import scored_part
from mcore_rl.megatron.model.loading import load_value_model
from mcore_rl.megatron.model.value_model import ValueModel
from mcore_rl.megatron.roles.rank_model import FrozenModel, join_and_build
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.types import RankShare, TrajectoryBuffers


class MegatronRewardModel(FrozenModel):
    """The model of the section `reward_model`, with its own layout.

    With reward_model.offload.params, `memory` keeps the weights in host memory between passes. `init_method` is like
    MegatronActor's.

    Collective: every method, over all ranks.
    Raises: ConfigError, naming `reward_model` keys, for a model or layout that cannot be built.
    """

    def __init__(self, config: Config, rank: int, world_size: int, init_method: str | None) -> None:
        role = ModelRole.reward_model(config.reward_model, config.model)
        spec = ResolvedModel.value_model(role, world_size)
        chunks = join_and_build(config, spec, rank, init_method, ValueModel)
        # Without a seed a causal model is rejected: its value head would be random.
        load_value_model(chunks, role.model.hf_path, spec.layout, seed=None, key=role.checkpoint)
        super().__init__(spec, chunks, offload=role.section.offload.params)
        self.memory.offload()
        self._padding_id: int | None = spec.hf_config.get("pad_token_id")

    def score(self, sequences: Mapping[int, np.ndarray]) -> dict[int, float]:
        """Score the sequences of this data-parallel rank, by their keys. Ranks of other stages than the last get {}.

        The score is the head's output at the last token that is not the model's padding token, like in transformers'
        sequence classification. If the end token is also the padding token, the score comes from the token before it.

        Shapes: sequences integer [S], S >= 1.
        """
        numbers = list(sequences)
        share, chunk = _as_share(numbers, [scored_part(sequences[number], self._padding_id) for number in numbers])
        values_by_batch = self.infer(self.microbatches(share, [chunk]), self.whole_outputs)
        self.memory.offload()
        return {sample: float(value[0]) for values in values_by_batch for sample, value in values.items()}


def _as_share(numbers: Sequence[int], sequences: Sequence[np.ndarray]) -> tuple[RankShare, TrajectoryBuffers]:
    """Convert sequences to trajectories whose prompt is the sequence and whose response is one dummy token.

    The predictor of the dummy token is the sequence's last token. `total_tokens` does not count the dummy token,
    because no rank computes it.
    """
    lengths, count = np.array([len(sequence) for sequence in sequences], np.int32), len(sequences)
    dummy = np.zeros(1, np.int32)
    pieces = [piece for sequence in sequences for piece in (sequence, dummy)]
    zeros = np.zeros(count, np.float32)
    chunk = TrajectoryBuffers(
        tokens=np.concatenate([np.empty(0, np.int32), *pieces]).astype(np.int32, copy=False),
        token_offsets=np.concatenate([[0], np.cumsum(lengths + 1)]).astype(np.int64),
        prompt_tokens=lengths,
        response_offsets=np.arange(count + 1, dtype=np.int64),
        logp_rollout=zeros,
        versions=np.zeros(count, np.int32),
        trained=np.ones(count, np.uint8),
    )
    share = RankShare(
        samples=np.array(numbers, np.int64),
        chunk_ids=np.zeros(count, np.int32),
        rows=np.arange(count, dtype=np.int32),
        origins=np.zeros((count, 2), np.int32),
        total_tokens=lengths,
        rewards=zeros,
        advantages=zeros,
        loss_weights=zeros,
    )
    return share, chunk
