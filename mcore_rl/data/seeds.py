"""Sampling seeds of requests."""

from __future__ import annotations

import numpy as np


def request_seeds(seed: int, group_ids: np.ndarray, samples: int) -> np.ndarray:
    """Return one seed per response that depends only on (run seed, group, sample).

    Shapes: group_ids int64 [G] -> int64 [G * samples], below 2**31 (engines use signed 32-bit seeds).
    Source: the finaliser of splitmix64.
    """
    # Each group has 2**20 consecutive numbers, so that the responses of a run have distinct numbers.
    keys = np.repeat(group_ids.astype(np.uint64), samples) * np.uint64(1 << 20)
    keys += np.tile(np.arange(samples, dtype=np.uint64), len(group_ids))
    keys += np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((keys ^ (keys >> np.uint64(31))) >> np.uint64(33)).astype(np.int64)


def turn_seed(seed: int, history: int, again: int) -> int:
    """Return the seed of an episode's turn.

    history: CRC-32 of the turn's prompt. again: number of earlier requests with this prompt in the episode.
    """
    return int(request_seeds(seed, np.array([history + (again << 32)]), 1)[0])
