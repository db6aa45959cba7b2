"""Sampling on a GPU and on a CPU gives the same tokens, in bounded memory next to the probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mcore_rl.engines.noise import CHUNK_ELEMENTS, noise_keys, sample_in_chunks, sample_tokens

pytestmark = pytest.mark.cuda

VOCABULARY = 151_936
ROWS = 1024


def test_tokens_are_those_of_a_cpu(device: str) -> None:
    """64 rows are several chunks on either device. A tie of two times within the last bit of `log` has a probability of
    1e-12 per row."""
    logits = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    keys, probabilities = noise_keys(range(64), np.arange(64)), logits.softmax(-1)
    expected = sample_tokens(probabilities, keys)
    assert sample_tokens(probabilities.to(device), keys.to(device)).cpu().tolist() == expected.tolist()


@pytest.mark.cuda(only=True)
@pytest.mark.parametrize(
    ("sample", "limit"),
    [
        pytest.param(sample_tokens, 4 << 20, id="kernel"),
        pytest.param(sample_in_chunks, 16 * CHUNK_ELEMENTS["cuda"] + (4 << 20), id="chunks"),
    ],
)
def test_noise_takes_bounded_memory(
    sample: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], limit: int, report: Callable[[str], None]
) -> None:
    """Noise of all rows at once would take 2.5 GB. The allocator rounds to 2 MiB."""
    probabilities = torch.rand(ROWS, VOCABULARY, device="cuda")
    keys = noise_keys(range(ROWS), np.arange(ROWS)).cuda()
    sample(probabilities, keys)  # compiles the kernel, or creates the table of tokens
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    sample(probabilities, keys)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    rise = torch.cuda.max_memory_allocated() - before
    assert rise <= limit
    report(f"{ROWS} x {VOCABULARY}: {seconds * 1e3:.1f} ms, {rise / 2**20:.0f} MiB")


@pytest.mark.cuda(only=True)
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_kernel_samples_the_tokens_of_torch(rows: int) -> None:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)).cuda() * 3
    logits[:, 1::3] = -torch.inf  # truncated by top-k
    keys, probabilities = noise_keys(range(rows), np.arange(rows)).cuda(), logits.softmax(-1)
    assert sample_tokens(probabilities, keys).tolist() == sample_in_chunks(probabilities, keys).tolist()
