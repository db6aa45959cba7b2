"""State of the current training batch on one rank of the policy or critic, passed from one forward pass to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mcore_rl.types import RankShare, TrajectoryBuffers


@dataclass(frozen=True)
class RankBatch:
    """The policy's batch: this rank's shares, one per update, their trajectories, and per-token results.

    Each forward pass returns a new RankBatch with its results added; a rank has no other state about the current batch.
    Results are by sample, on the ranks of the last stage:

    old_logp: log-probabilities of the policy before the first update. The first update adds the entries of its samples.
    ref_logp: log-probabilities of the reference.
    penalties: KL penalties, to be subtracted from the rewards.
    token_advantages: advantages per token.

    replays: whether the later updates use the experts that the policy chose before the first update.

    Shapes: old_logp, ref_logp [n], the trained tokens of this context-parallel rank; penalties, token_advantages
    float32 [n], all trained tokens. Units: logp in nats.
    """

    shares: Sequence[RankShare]
    chunks: Sequence[TrajectoryBuffers]
    old_logp: dict[int, torch.Tensor] = field(default_factory=dict)
    ref_logp: Mapping[int, torch.Tensor] = field(default_factory=dict)
    penalties: Mapping[int, np.ndarray] = field(default_factory=dict)
    token_advantages: Mapping[int, np.ndarray] = field(default_factory=dict)
    replays: bool = False


@dataclass(frozen=True)
class ValuedBatch:
    """The critic's batch: this rank's shares, one per update, their trajectories, and the values before the updates.

    values: the critic's values by sample, on every rank of the last stage.

    Shapes: values float32 [n], all trained tokens of the response.
    """

    shares: Sequence[RankShare]
    chunks: Sequence[TrajectoryBuffers]
    values: Mapping[int, np.ndarray]
