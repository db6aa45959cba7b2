"""Sampling follows the distribution and depends only on seed and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mcore_rl.engines import noise
from mcore_rl.engines.noise import CHUNK_ELEMENTS, log_uniform, noise_keys, sample_tokens

MASK = 2**64 - 1


def test_sample_tokens_follow_distribution() -> None:
    """Chi-squared test with 200,000 seeds, and with 200,000 positions of a seed, at 0.1 % (15 degrees of freedom)."""
    probabilities = (torch.randn(16, generator=torch.Generator().manual_seed(0)) * 2).softmax(-1)
    expected, count = probabilities.double() * 200_000, np.arange(200_000)
    for seeds, positions in ((count, np.full_like(count, 9)), (np.full_like(count, 9), count)):
        sampled = sample_tokens(probabilities.expand(len(count), -1), noise_keys(seeds.tolist(), positions))
        observed = sampled.bincount(minlength=16)
        assert float(((observed - expected) ** 2 / expected).sum()) < 37.7


@pytest.mark.parametrize("columns", [300, CHUNK_ELEMENTS["cpu"] // 7])
def test_sample_tokens_row_depends_only_on_its_seed_and_position(columns: int) -> None:
    rng = np.random.default_rng(1)
    probabilities = torch.from_numpy(rng.dirichlet(np.full(columns, 0.1), 40)).float()
    seeds, positions = rng.integers(0, 2**31, 40), rng.integers(0, 5000, 40)
    together = sample_tokens(probabilities, noise_keys(seeds.tolist(), positions))
    order = rng.permutation(40)
    assert sample_tokens(probabilities[order], noise_keys(seeds[order].tolist(), positions[order])).equal(
        together[order]
    )
    for i in range(0, 40, 9):
        assert (
            int(sample_tokens(probabilities[i : i + 1], noise_keys([int(seeds[i])], positions[i : i + 1])))
            == together[i]
        )
    assert sample_tokens(probabilities, noise_keys(seeds.tolist(), positions + 1)).ne(together).float().mean() > 0.5
    assert sample_tokens(probabilities, noise_keys((seeds + 1).tolist(), positions)).ne(together).float().mean() > 0.5
    assert sample_tokens(probabilities * 3, noise_keys(seeds.tolist(), positions)).equal(together)


@pytest.mark.parametrize("columns", [7, 96, 5000])
def test_log_uniform_equals_splitmix64(columns: int) -> None:
    """Compare with Python integers, for seeds and positions up to the largest."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    weyl, of_rows = 0x9E3779B97F4A7C15, [(0, 0), (1, 17), (2**64 - 1, 2**31), (2**31 - 1, 40960)]
    seeds, positions = zip(*of_rows, strict=True)
    found = log_uniform(noise_keys(seeds, np.array(positions)), columns)
    for (seed, position), row in zip(of_rows, found.tolist(), strict=True):
        state = mix((mix(seed) + position * weyl) & MASK)
        for token in (0, 3, columns - 1):
            uniform = ((mix((state + (token + 1) * weyl) & MASK) >> 12) + 0.5) / 2**52
            assert row[token] == pytest.approx(math.log(uniform), rel=1e-13)


def test_sample_tokens_zero_probability_is_never_sampled() -> None:
    probabilities = torch.randn(3000, 9, generator=torch.Generator().manual_seed(4)).softmax(-1)
    probabilities[:, ::3] = 0.0
    sampled = sample_tokens(probabilities, noise_keys(range(3000), np.zeros(3000, np.int64)))
    assert (sampled % 3 != 0).all()


def test_log_uniform_neighbours_are_uncorrelated() -> None:
    """Correlations of neighbouring seeds, positions and tokens, 100,000 pairs, within five standard errors."""
    times = -log_uniform(noise_keys(range(1000), np.full(1000, 3)), 101).numpy()
    later = -log_uniform(noise_keys(range(1000), np.full(1000, 4)), 101).numpy()
    for first, second in [(times[:, :-1], times[:, 1:]), (times[:-1], times[1:]), (times, later)]:
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 5 / np.sqrt(first.size)
    assert abs(times.mean() - 1) < 0.02


def test_sample_tokens_no_rows_returns_empty() -> None:
    assert sample_tokens(torch.empty(0, 5), noise_keys([], np.empty(0, np.int64))).tolist() == []


@pytest.mark.parametrize(("rows", "columns"), [(1024, 151_936), (256, 129_280), (7, 1 << 24), (3, 300)])
def test_sample_tokens_draws_bounded_noise_at_once_on_gpus(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on meta, which have no memory, are divided like a GPU's."""
    calls: list[tuple[str, int]] = []

    def recorded(keys: torch.Tensor, columns: int) -> torch.Tensor:
        calls.append((keys.device.type, len(keys)))
        return torch.empty(len(keys), columns, dtype=torch.float64, device=keys.device)

    monkeypatch.setattr(noise, "log_uniform", recorded)
    keys = torch.zeros(rows, dtype=torch.int64, device="meta")
    assert sample_tokens(torch.empty(rows, columns, device="meta"), keys).shape == (rows,)
    assert {device for device, _ in calls} == {"meta"}
    assert sum(count for _, count in calls) == rows
    assert all(count == 1 or count * columns <= 8 << 20 for _, count in calls)


@pytest.mark.parametrize("elements", [1, 300, 1000, 1 << 30])
def test_sample_tokens_chunk_size_does_not_change_tokens(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = torch.randn(40, 300, generator=torch.Generator().manual_seed(2)).softmax(-1)
    keys = noise_keys(range(40), np.arange(40))
    expected = log_uniform(keys, 300).div_(probabilities).argmax(-1)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", elements)
    assert sample_tokens(probabilities, keys).equal(expected)
