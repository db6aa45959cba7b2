"""Token-level advantages on ranks, compared with the same estimator applied to the whole batch at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mcore_rl.algorithms import compute_advantages
from mcore_rl.algorithms.advantages.per_token import GAE, ReinforcePlusPlus
from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.step import estimation
from mcore_rl.megatron.step.estimation import estimate_tokens
from mcore_rl.types import RankShare, TrajectoryBuffers, merge_metrics

# Responses in two chunks. The second has a gap (a tool's output), the third no trained token.
TRAINED = [[[1, 1, 1], [1, 0, 0, 1, 1], [0, 0]], [[1], [1, 1, 1, 1]]]


def buffers(trained: list[list[int]]) -> TrajectoryBuffers:
    lengths = [len(row) for row in trained]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(ends[-1])
    return TrajectoryBuffers(
        tokens=np.zeros(total + len(lengths), np.int32),
        token_offsets=ends + np.arange(len(ends)),
        prompt_tokens=np.ones(len(lengths), np.int32),
        response_offsets=ends,
        logp_rollout=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
        trained=np.array([token for row in trained for token in row], np.uint8),
    )


CHUNKS = [buffers(part) for part in TRAINED]
COUNTS = {4: 3, 9: 3, 2: 0, 7: 1, 5: 4}
REWARDS = {4: 1.0, 9: -0.5, 2: 3.0, 7: 0.25, 5: 2.0}
VALUES = {sample: np.linspace(0.1, 0.5, count).astype(np.float32) * sample for sample, count in COUNTS.items()}


def share() -> RankShare:
    samples = np.array(list(COUNTS), np.int64)
    zeros = np.zeros(len(samples), np.float32)
    return RankShare(
        samples=samples,
        chunk_ids=np.array([0, 0, 0, 1, 1], np.int32),
        rows=np.array([0, 1, 2, 0, 1], np.int32),
        origins=np.zeros((5, 2), np.int32),
        total_tokens=np.array([4, 6, 3, 2, 5], np.int32),
        rewards=np.array(list(REWARDS.values()), np.float32),
        advantages=zeros,
        loss_weights=zeros,
    )


def padded(by_sample: dict[int, np.ndarray]) -> torch.Tensor:
    rows = [torch.from_numpy(np.pad(by_sample[sample], (0, 4 - count))) for sample, count in COUNTS.items()]
    return torch.stack(rows).float()


def whole(name: str, **options: float) -> dict[str, torch.Tensor]:
    mask = torch.tensor([[t < count for t in range(4)] for count in COUNTS.values()]).float()
    rewards = torch.zeros(5, 4)
    for row, (sample, count) in enumerate(COUNTS.items()):
        if count:
            rewards[row, count - 1] = REWARDS[sample]
    values = padded(VALUES) if name == "gae" else None
    found = compute_advantages(name, token_rewards=rewards, mask=mask, values=values, **options)
    return {"advantages": found.advantages, "returns": found.returns}


@pytest.mark.parametrize("block_tokens", [1, 8, 1 << 20], ids=["a row", "two rows", "all"])
@pytest.mark.parametrize(
    ("name", "estimator", "options"),
    [
        ("gae", GAE(gamma=0.9, lam=0.8), {"gamma": 0.9, "lam": 0.8}),
        ("gae", GAE(lam=0.5, whiten=False), {"lam": 0.5, "whiten": False}),
        ("reinforce_plus_plus", ReinforcePlusPlus(gamma=0.7), {"gamma": 0.7}),
    ],
    ids=["gae", "gae raw", "reinforce_plus_plus"],
)
def test_estimate_tokens_in_blocks_equals_whole_batch(monkeypatch, block_tokens, name, estimator, options) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(estimation, "BLOCK_TOKENS", block_tokens)
    found = estimate_tokens(estimator, share(), CHUNKS, values=VALUES if name == "gae" else None)
    expected = whole(name, **options)
    for field, by_sample in (("advantages", found.advantages), ("returns", found.returns)):
        assert {sample: len(part) for sample, part in by_sample.items()} == COUNTS
        assert torch.allclose(padded(by_sample), expected[field], atol=1e-6)


def test_token_estimate_metrics_merge_over_ranks() -> None:
    options = {"gamma": 1.0, "lam": 0.9, "whiten": False}
    found = estimate_tokens(GAE(**options), share(), CHUNKS, values=VALUES, penalties=None, group=None)
    flat = np.concatenate(list(found.returns.values())).astype(np.float64)
    assert len(flat) == sum(COUNTS.values())
    halves = [
        type(found)({s: found.advantages[s] for s in half}, {s: found.returns[s] for s in half}).describe()
        for half in ([4, 9, 2], [7, 5])
    ]
    metrics = {name: metric.value for name, metric in merge_metrics(halves).items()}
    expected = {"mean": flat.mean(), "std": flat.std(), "max": flat.max(), "min": flat.min()}
    for name, value in expected.items():
        assert metrics[f"returns/{name}"] == pytest.approx(value, rel=1e-9)
    assert metrics["advantages/std"] > 0


def test_estimate_tokens_subtracts_penalties_per_token() -> None:
    penalties = {sample: np.full(count, 0.5, np.float32) for sample, count in COUNTS.items()}
    plain = GAE(whiten=False)
    without = estimate_tokens(plain, share(), CHUNKS, values=VALUES)
    found = estimate_tokens(plain, share(), CHUNKS, values=VALUES, penalties=penalties)
    # With lam = gamma = 1, a token's advantage contains its own penalty and all later ones.
    for sample, count in COUNTS.items():
        expected = without.advantages[sample] - 0.5 * np.arange(count, 0, -1)
        assert found.advantages[sample] == pytest.approx(expected, abs=1e-5)


def test_estimate_tokens_names_samples_without_values() -> None:
    with pytest.raises(McoreRLError, match=r"\[9\]"):
        estimate_tokens(GAE(), share(), CHUNKS, values={s: v for s, v in VALUES.items() if s != 9})


def test_turn_rewards_are_assigned_to_ends_of_turns() -> None:
    """With gamma = lam = 1 and no values, a token's return is the sum of all later rewards."""
    turns = [np.zeros(10, np.float32), np.zeros(5, np.float32)]
    turns[0][3] = 0.75  # sample 9's first turn ends before the gap
    turns[1][2] = -1.0  # sample 5's second token
    chunks = [replace(chunk, turn_rewards=part) for chunk, part in zip(CHUNKS, turns, strict=True)]
    found = estimate_tokens(ReinforcePlusPlus(gamma=1.0), share(), chunks)
    assert found.returns[4].tolist() == [1.0] * 3
    assert found.returns[9].tolist() == [-0.5, -1.25, -1.25]
    assert found.returns[5].tolist() == [2.0, 2.0, 3.0, 3.0]
    assert found.returns[7].tolist() == [0.25]
    nothing = [replace(chunk, turn_rewards=np.zeros_like(part)) for chunk, part in zip(CHUNKS, turns, strict=True)]
    without, plain = (estimate_tokens(ReinforcePlusPlus(gamma=0.7), share(), c) for c in (nothing, CHUNKS))
    for sample in COUNTS:
        np.testing.assert_array_equal(without.advantages[sample], plain.advantages[sample])
