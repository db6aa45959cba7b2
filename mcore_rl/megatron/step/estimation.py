"""Per-token advantages, computed on the ranks that hold the tokens, for estimators that use values or discounting.

The reward of a response is assigned to its last trained token, except for turn rewards, which are at the ends of turns.
Tokens between trained tokens (a tool's output) are left out. Every rank of the last stage computes the advantages of
its data-parallel share; to whiten advantages over the batch, data-parallel ranks exchange three numbers each. For
baselines of tokens, they exchange sums over the responses of each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.advantages.token_baseline import GroupTokenEstimator, Reduce
from mcore_rl.algorithms.interface import AdvantageInputs, Estimator
from mcore_rl.algorithms.whitening import Moments, whiten
from mcore_rl.errors import McoreRLError
from mcore_rl.types import Deviation, Max, Mean, Metric, Min, RankShare, TrajectoryBuffers

BLOCK_TOKENS = 1 << 22
"""Maximum number of tokens, with padding, that are processed at a time."""


@dataclass
class TokenEstimates:
    """Per-token advantages and returns. Shapes: float32 [n] by sample, one per trained token."""

    advantages: dict[int, np.ndarray] = field(default_factory=dict)
    returns: dict[int, np.ndarray] = field(default_factory=dict)

    def describe(self) -> dict[str, Metric]:
        """Return the metrics over all tokens of these samples."""
        metrics: dict[str, Metric] = {}
        for name, by_sample in (("advantages", self.advantages), ("returns", self.returns)):
            flat = np.concatenate([np.empty(0, np.float32), *by_sample.values()]).astype(np.float64)
            if len(flat):
                metrics[f"{name}/mean"] = Mean(float(flat.sum()), len(flat))
                metrics[f"{name}/std"] = Deviation(float(flat.sum()), float(flat @ flat), len(flat))
                metrics[f"{name}/max"] = Max(float(flat.max()))
                metrics[f"{name}/min"] = Min(float(flat.min()))
                metrics[f"{name}/abs_max"] = Max(float(np.abs(flat).max()))
        return metrics


def estimate_tokens(
    estimator: Estimator,
    share: RankShare,
    chunks: Sequence[TrajectoryBuffers],
    *,
    values: Mapping[int, np.ndarray] | None = None,
    penalties: Mapping[int, np.ndarray] | None = None,
    score_norms: Mapping[int, np.ndarray] | None = None,
    group: dist.ProcessGroup | None = None,
) -> TokenEstimates:
    """Compute advantages and returns of every trained token of the share.

    penalties: subtracted from the rewards. score_norms: for estimators that need them; the groups of the share may
    then have samples on other ranks. group: the data-parallel ranks; None for one rank.

    Shapes: values, penalties, score_norms [n] by sample.
    Collective: `group`, if the estimator whitens or needs score_norms.
    Raises: McoreRLError for samples without values.
    """
    missing = [] if values is None else [int(sample) for sample in share.samples if int(sample) not in values]
    if missing:
        raise McoreRLError(f"samples {missing} have no values")
    counts = trained_tokens(share, chunks)
    turns = _turn_rewards(share, chunks)
    blocks = [_block(share, rows, counts, values, penalties, turns) for rows in _row_blocks(counts)]
    if estimator.needs.score_norms:
        assert score_norms is not None
        blocks = [
            _with_groups(share, rows, inputs, score_norms)
            for rows, inputs in zip(_row_blocks(counts), blocks, strict=True)
        ]
        raw = cast(GroupTokenEstimator, estimator).over_ranks(blocks, _reduction(group))
    else:
        raw = [estimator.raw(inputs) for inputs in blocks]
    advantages = [result.advantages for result in raw]
    if estimator.whitened:
        parts = (Moments.of(result.advantages, inputs.mask) for result, inputs in zip(raw, blocks, strict=True))
        moments = _over_ranks(sum(parts, Moments()), group)
        advantages = [whiten(part, inputs.mask, moments) for part, inputs in zip(advantages, blocks, strict=True)]
    returns = [result.returns for result in raw]
    return TokenEstimates(_by_sample(share, counts, advantages), _by_sample(share, counts, returns))


def trained_tokens(share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> np.ndarray:
    """Number of trained tokens of each sample, int64 [b]."""
    counts = np.zeros(len(share.samples), np.int64)
    for index, (chunk, row) in enumerate(zip(share.chunk_ids, share.rows, strict=True)):
        offsets = chunks[chunk].response_offsets
        counts[index] = np.count_nonzero(chunks[chunk].trained[offsets[row] : offsets[row + 1]])
    return counts


def _turn_rewards(share: RankShare, chunks: Sequence[TrajectoryBuffers]) -> dict[int, np.ndarray]:
    """Turn rewards at each sample's trained tokens, float32 [n] by sample; empty for samples without turn rewards."""
    found = {}
    for sample, chunk, row in zip(share.samples.tolist(), share.chunk_ids, share.rows, strict=True):
        buffers = chunks[chunk]
        if buffers.turn_rewards is not None:
            response = slice(*buffers.response_offsets[row : row + 2])
            found[sample] = buffers.turn_rewards[response][buffers.trained[response] > 0]
    return found


def _row_blocks(counts: np.ndarray) -> Iterator[np.ndarray]:
    """Split the samples into blocks of at most BLOCK_TOKENS tokens when padded to the longest sample of the share."""
    if len(counts):
        rows = max(BLOCK_TOKENS // max(int(counts.max()), 1), 1)
        yield from np.split(np.arange(len(counts)), range(rows, len(counts), rows))


def _block(
    share: RankShare,
    rows: np.ndarray,
    counts: np.ndarray,
    values: Mapping[int, np.ndarray] | None,
    penalties: Mapping[int, np.ndarray] | None,
    turns: Mapping[int, np.ndarray],
) -> AdvantageInputs:
    samples, ends = share.samples[rows].tolist(), counts[rows]
    mask = np.arange(int(ends.max(initial=0)))[None] < ends[:, None]

    def padded(by_sample: Mapping[int, np.ndarray]) -> np.ndarray:
        cells = np.zeros(mask.shape, np.float32)
        cells[mask] = np.concatenate([by_sample[sample] for sample in samples])
        return cells

    rewards = np.zeros(mask.shape, np.float32)
    some = ends > 0
    # The last trained token gets the reward of the response.
    rewards[np.flatnonzero(some), ends[some] - 1] = share.rewards[rows][some]
    if turns:
        # The response's reward includes its turn rewards: move them from the last token to the ends of the turns.
        turn_rewards = padded(turns)
        rewards[np.flatnonzero(some), ends[some] - 1] -= turn_rewards.sum(axis=1, dtype=np.float64)[some]
        rewards += turn_rewards
    if penalties is not None:
        rewards -= padded(penalties)
    return AdvantageInputs(
        token_rewards=torch.from_numpy(rewards),
        mask=torch.from_numpy(mask).float(),
        values=None if values is None else torch.from_numpy(padded(values)),
    )


def _with_groups(
    share: RankShare, rows: np.ndarray, inputs: AdvantageInputs, score_norms: Mapping[int, np.ndarray]
) -> AdvantageInputs:
    """Add the groups of the samples and the norms of their tokens to a block."""
    assert share.groups is not None
    norms = torch.zeros_like(inputs.token_rewards)
    values = [score_norms[sample] for sample in share.samples[rows].tolist()]
    norms[inputs.mask > 0] = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *values]))
    return replace(inputs, group_ids=torch.from_numpy(share.groups[rows]), score_norms=norms)


def _reduction(group: dist.ProcessGroup | None) -> Reduce:
    """Return the function that reduces host tensors over `group`."""
    kinds = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"

    def reduce(tensor: torch.Tensor, kind: Literal["sum", "min", "max"]) -> torch.Tensor:
        if group is None or group.size() == 1:
            return tensor
        on_device = tensor.to(device)
        dist.all_reduce(on_device, op=kinds[kind], group=group)
        return on_device.cpu()

    return reduce


def _over_ranks(rank_moments: Moments, group: dist.ProcessGroup | None) -> Moments:
    if group is None or group.size() == 1:
        return rank_moments
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    # Each rank fills its own row; merging rows in order gives the same bits on every rank, unlike a sum of moments.
    rows = torch.zeros(group.size(), 3, dtype=torch.float64, device=device)
    rows[group.rank()] = rank_moments.as_tensor()
    dist.all_reduce(rows, group=group)
    return Moments.merged(rows.cpu())


def _by_sample(share: RankShare, counts: np.ndarray, blocks: Sequence[torch.Tensor]) -> dict[int, np.ndarray]:
    rows = (row for block in blocks for row in block.numpy())
    return {
        sample: row[:count].astype(np.float32)
        for sample, count, row in zip(share.samples.tolist(), counts.tolist(), rows, strict=True)
    }
