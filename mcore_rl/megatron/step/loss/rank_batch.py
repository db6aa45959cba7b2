"""The batch of a rank of the policy, with the results of its passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.step.distillation import TeacherOutputs
from mcore_rl.megatron.step.loss.trained_tokens import TrainedTokens
from mcore_rl.types import RankShare, TrajectoryBuffers


@dataclass(frozen=True)
class RankBatch:
    """The policy's batch: this rank's shares, one per update, their trajectories, and per-token results.

    Each forward pass returns a new RankBatch with its results added; a rank has no other state about the current batch.
    Results are by sample, on the ranks of the last stage:

    old_logp: log-probabilities of the policy before the first update. The first update adds the entries of its samples.
    ref_logp: log-probabilities of the reference.
    teacher: outputs of the teacher's pass.
    penalties: KL penalties, to be subtracted from the rewards.
    token_advantages: advantages per token.

    entropy_coefficient: coefficient of the entropy bonus; None: the configured one.
    replays: whether the later updates use the experts that the policy chose before the first update.

    Shapes: old_logp, ref_logp [n], the trained tokens of this context-parallel rank; penalties, token_advantages
    float32 [n], all trained tokens. Units: logp in nats.
    """

    shares: Sequence[RankShare]
    chunks: Sequence[TrajectoryBuffers]
    old_logp: dict[int, torch.Tensor] = field(default_factory=dict)
    ref_logp: Mapping[int, torch.Tensor] = field(default_factory=dict)
    teacher: TeacherOutputs = field(default_factory=TeacherOutputs)
    penalties: Mapping[int, np.ndarray] = field(default_factory=dict)
    token_advantages: Mapping[int, np.ndarray] = field(default_factory=dict)
    entropy_coefficient: float | None = None
    replays: bool = False


def stored_logp(
    batch: TrainedTokens, by_sample: Mapping[int, torch.Tensor], like: torch.Tensor, which: str
) -> torch.Tensor:
    """Join log-probabilities of a micro-batch's tokens, [N], with the type of `like`. which: their model, for errors.

    Raises: McoreRLError that names samples without them.
    """
    unknown = [sample for sample in batch.samples if sample not in by_sample]
    if unknown:
        raise McoreRLError(
            f"samples {unknown} have no {which} log-probabilities: they must be computed before the updates of a batch"
        )
    return torch.cat([like.new_empty(0), *(by_sample[sample] for sample in batch.samples)])
