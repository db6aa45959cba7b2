"""Sampling noise of engines: identical on every engine and device, from the request's seed and the token's position.

    token = argmin over v of  -log(u(seed, position, v)) / p(v)

samples from p (exponential race: the first of independent exponential clocks with rates p). u is a hash, so there is no
generator state that an abort, a preemption or another batch could change: a response that is continued elsewhere
continues exactly, and engines that compute the same probabilities sample the same tokens. The hash is the finalizer of
splitmix64 (Steele, Lea and Flood 2014), applied to seed, position and token in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

# torch has no unsigned 64-bit arithmetic: tensors use these constants minus 2**64, which has the same bits.
_WEYL, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIFORM_BITS = 52
"""A 52-bit integer plus 0.5 is exact in float64, so u is never 0 or 1."""
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Elements per chunk of rows, by device type. On CPU the noise of a chunk fits in a core's cache. On a GPU engines use
the kernel of noise_kernel.py; tests compare it with chunks, which take 16 bytes per element, 128 MiB each."""


def noise_keys(seeds: Sequence[int], positions: np.ndarray) -> torch.Tensor:
    """Hash seed and position of each row for sample_tokens.

    positions: position of the token to sample, counted from the first token of the prompt.
    Shapes: positions integer [rows] -> int64 [rows].
    """
    states = _mix(np.array(seeds, np.uint64)) + positions.astype(np.uint64) * np.uint64(_WEYL)
    return torch.from_numpy(_mix(states).view(np.int64))


def device_noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute noise_keys on the device of the seeds, without a synchronization.

    Shapes: seeds int64 [rows], positions integer [rows] -> int64 [rows].
    """
    return _mix_in_place(_mix_in_place(seeds.clone()) + positions.to(torch.int64) * (_WEYL - 2**64))


def sample_tokens(probabilities: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sample one token per row.

    probabilities: need not be normalised.
    keys: result of noise_keys, on the same device.
    Shapes: probabilities float [rows, V], keys int64 [rows] -> int64 [rows].
    """
    if probabilities.device.type == "cuda":
        from mcore_rl.engines import noise_kernel

        return noise_kernel.sample_tokens(probabilities, keys)
    return sample_in_chunks(probabilities, keys)


def sample_in_chunks(probabilities: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Implement sample_tokens with torch, in chunks of rows whose noise has at most CHUNK_ELEMENTS elements."""
    rows, columns = probabilities.shape
    # A row is never divided: it has at most a few hundred thousand columns.
    num_rows = max(1, CHUNK_ELEMENTS.get(probabilities.device.type, CHUNK_ELEMENTS["cuda"]) // columns)
    if rows <= num_rows:
        return log_uniform(keys, columns).div_(probabilities).argmax(-1)
    parts = zip(probabilities.split(num_rows), keys.split(num_rows), strict=True)
    return torch.cat([log_uniform(part_keys, columns).div_(part).argmax(-1) for part, part_keys in parts])


def log_uniform(keys: torch.Tensor, columns: int) -> torch.Tensor:
    """Compute log(u) of the first `columns` tokens: the negated times of exponential clocks with rate 1.

    Shapes: float64 [rows, columns].
    """
    x = _mix_in_place(keys[:, None] + _tokens(columns, keys.device))
    x.bitwise_right_shift_(64 - _UNIFORM_BITS).bitwise_and_((1 << _UNIFORM_BITS) - 1)
    return x.double().add_(0.5).mul_(2.0**-_UNIFORM_BITS).log_()


@lru_cache(4)
def _tokens(columns: int, device: torch.device) -> torch.Tensor:
    """Return the increment of each token to the state of a row."""
    return torch.arange(1, columns + 1, device=device).mul_(_WEYL - 2**64)


def _mix_in_place(x: torch.Tensor) -> torch.Tensor:
    """Apply _mix to an int64 tensor, and return it."""
    # torch has no unsigned 64-bit shift: the shift of int64 copies the sign bit, so mask the upper bits.
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_FIRST - 2**64)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_SECOND - 2**64)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64, a permutation of 64-bit integers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))
