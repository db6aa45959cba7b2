"""Sampling on a GPU draws the tokens of a CPU, in bounded memory next to the probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mcore_rl.engines.noise import CHUNK_ELEMENTS, noise_keys, sample_tokens

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
def test_noise_takes_the_memory_of_a_chunk(report: Callable[[str], None]) -> None:
    """All rows at once would take 2.5 GB."""
    probabilities = torch.rand(ROWS, VOCABULARY, device="cuda")
    keys = noise_keys(range(ROWS), np.arange(ROWS)).cuda()
    sample_tokens(probabilities, keys)  # creates the table of tokens
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    sample_tokens(probabilities, keys)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    rise = torch.cuda.max_memory_allocated() - before
    assert rise <= 16 * CHUNK_ELEMENTS["cuda"] + (4 << 20)  # the allocator rounds to 2 MiB
    report(f"{ROWS} x {VOCABULARY}: {seconds * 1e3:.1f} ms, {rise / 2**20:.0f} MiB")
