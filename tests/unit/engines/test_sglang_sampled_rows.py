"""Sampling of SGLang's batches on their device."""

from __future__ import annotations

import numpy as np
import torch

from mcore_rl.engines.noise import device_noise_keys, noise_keys, sample_tokens
from mcore_rl.engines.sglang.sampled_rows import SampledRows, sample_rows

ROWS, VOCABULARY = 64, 50


def make_rows(device: str) -> SampledRows:
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 5000, (ROWS,), generator=generator)
    seeds = torch.randint(0, 2**63 - 1, (ROWS,), generator=generator)
    top_ks = torch.tensor([1, 3, 1 << 30, 7]).repeat(ROWS // 4)
    rows = SampledRows(seeds, positions, top_ks, torch.full((ROWS,), 0.9), torch.full((ROWS,), 0.01))
    return SampledRows(*(getattr(rows, name).to(device) for name in SampledRows.__dataclass_fields__))


def test_device_noise_keys_equal_noise_keys_bit_by_bit() -> None:
    largest = 2**63 - 1
    seeds, positions = [0, 1, 2**31 - 1, largest, 12345], np.array([0, 17, 40960, 2**31, 5])
    for number in (np.int32, np.int64):
        here = torch.from_numpy(np.minimum(positions, np.iinfo(number).max).astype(number))
        expected = noise_keys(seeds, here.numpy())
        assert device_noise_keys(torch.tensor(seeds), here).equal(expected)


def test_sample_rows_equal_tokens_with_the_keys_of_numpy() -> None:
    rows = make_rows("cpu")
    probabilities = torch.rand(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(2)).softmax(-1)
    sampled = sample_rows(probabilities.clone(), rows, truncate=False)
    expected = sample_tokens(probabilities, noise_keys(rows.seeds.tolist(), rows.positions.numpy()))
    greedy = rows.top_ks == 1
    assert sampled[greedy].equal(probabilities.argmax(-1)[greedy].int())
    assert sampled[~greedy].equal(expected[~greedy].int())


def test_sample_rows_never_waits_for_its_device() -> None:
    """Meta tensors have no values: every operation that reads one on the host raises an error."""
    for truncate in (False, True):
        probabilities = torch.rand(ROWS, VOCABULARY, device="meta")
        sampled = sample_rows(probabilities, make_rows("meta"), truncate=truncate)
        assert (sampled.shape, sampled.dtype, sampled.device.type) == ((ROWS,), torch.int32, "meta")
