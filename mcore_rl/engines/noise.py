"""How engines draw a token: the same way on every engine and device, from the request's seed and the token's place.

    token = argmin over v of  -log(u(seed, position, v)) / p(v)

which draws from p: the first of exponential clocks that tick at the rates p. u is a hash, so nothing has a state that
an abort, a preemption or another batch could disturb: a response that goes on somewhere else goes on exactly, and
engines that compute the same probabilities draw the same tokens. The hash is the finalizer of splitmix64 (Steele, Lea
and Flood 2014), applied to seed, position and token in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

_WEYL, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIFORM_BITS = 52
"""Half a step more than a number of so many bits is exact in float64, so u is never 0 or 1."""
_CACHED = 1 << 17
"""Numbers that a core's cache holds; a GPU takes all rows at once."""


def places(seeds: Sequence[int], positions: np.ndarray) -> torch.Tensor:
    """What draw_tokens takes of each row: the request's seed, and the place of the token to draw, counted from the
    first one of the prompt. Shapes: positions integer [rows] -> int64 [rows]."""
    states = _mix(np.array(seeds, np.uint64)) + positions.astype(np.uint64) * np.uint64(_WEYL)
    return torch.from_numpy(_mix(states).view(np.int64))


def draw_tokens(probabilities: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """One token per row. Shapes: probabilities float [rows, V], whose sum may be anything; `at` of `places`, on the
    same device -> int64 [rows]."""
    rows, columns = probabilities.shape
    at_once = max(1, _CACHED // columns if probabilities.device.type == "cpu" else rows)
    if rows <= at_once:
        return log_uniform(at, columns).div_(probabilities).argmax(-1)
    parts = zip(probabilities.split(at_once), at.split(at_once), strict=True)
    return torch.cat([log_uniform(of_part, columns).div_(part).argmax(-1) for part, of_part in parts])


def log_uniform(at: torch.Tensor, columns: int) -> torch.Tensor:
    """log(u) of the first `columns` tokens: minus an exponential clock's time. Shapes: float64 [rows, columns]."""
    x = at[:, None] + _tokens(columns, at.device)
    # The shift of int64 keeps the sign: the bits that come in from the left are taken off.
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_FIRST - 2**64)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_SECOND - 2**64)
    x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))
    x.bitwise_right_shift_(64 - _UNIFORM_BITS).bitwise_and_((1 << _UNIFORM_BITS) - 1)
    return x.double().add_(0.5).mul_(2.0**-_UNIFORM_BITS).log_()


@lru_cache(4)
def _tokens(columns: int, device: torch.device) -> torch.Tensor:
    """What each token adds to the state of a row."""
    return torch.arange(1, columns + 1, device=device).mul_(_WEYL - 2**64)


def _mix(x: np.ndarray) -> np.ndarray:
    """A permutation of 64-bit numbers that leaves no pattern of its inputs."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))
