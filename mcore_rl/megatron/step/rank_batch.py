"""What a rank of the policy, or of the critic, knows of the batch that it trains on: its passes take and return it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mcore_rl.types import RankShare, TrajectoryBuffers


@dataclass(frozen=True)
class RankBatch:
    """This rank's shares of a batch, one per update, with the trajectories, and what passes have found of its tokens.

    Each pass returns the batch with its findings; nothing else on a rank says which batch is under way. By sample, on
    the ranks of the last stage: `old_logp` of the policy that the first update starts from (that update adds those of
    its own samples), `ref_logp` of the reference, `penalties` that the KL takes off the rewards, `token_advantages`.
    `replays`: updates after the first one replay the experts that the first policy chose.

    Shapes: old_logp, ref_logp [n], the trained tokens that this context-parallel rank has; penalties, token_advantages
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
    """This rank's shares of a batch, one per update, with trajectories, and the critic's `values` before the updates by
    sample, on every rank of the last stage. Shapes: values float32 [n], all trained tokens."""

    shares: Sequence[RankShare]
    chunks: Sequence[TrajectoryBuffers]
    values: Mapping[int, np.ndarray]
