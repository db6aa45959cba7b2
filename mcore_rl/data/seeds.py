"""Seeds of requests."""

from __future__ import annotations

import numpy as np


def request_seeds(seed: int, group_ids: np.ndarray, samples: int) -> np.ndarray:
    """A seed per response from (run seed, group, sample), so that no other response can change it.

    Shapes: group_ids int64 [G] -> int64 [G * samples], below 2**31 (engines take signed 32-bit seeds).
    Source: the finaliser of splitmix64.
    """
    keys = np.repeat(group_ids.astype(np.uint64), samples) * np.uint64(1 << 20)
    keys += np.tile(np.arange(samples, dtype=np.uint64), len(group_ids))
    keys += np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((keys ^ (keys >> np.uint64(31))) >> np.uint64(33)).astype(np.int64)


def turn_seed(seed: int, history: int, again: int) -> int:
    """A seed for what an episode samples after a history, of which `history` is a checksum, for the `again`-th time."""
    return int(request_seeds(seed, np.array([history + (again << 32)]), 1)[0])
