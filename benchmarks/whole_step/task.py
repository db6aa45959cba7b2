"""What both sides of benchmarks.whole_step.step do: the same number of responses, with the same lengths, each step.

Imported by the peer too, in its own environment: nothing but numpy here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PROMPTS, SAMPLES = 32, 8
RESPONSES = PROMPTS * SAMPLES
EQUAL_TOKENS = 16
LONGEST = 256
MEDIAN_TOKENS, SIGMA = 48.0, 0.8
"""Parameters of the lognormal lengths, cut at LONGEST. Their mean is 64; nearly every step has a longest response."""
WARM_UP = 2
LEARNING_RATE = 1e-6
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class Workload:
    """`aim` bounds the peer's seconds over ours. `peer_microbatch`, in responses, is the fastest for TRL of 16 ... 256:
    it pads, and with long tails large micro-batches are mostly padding. Of `steps` the first WARM_UP do not count."""

    name: str
    long_tailed: bool
    aim: str
    peer_microbatch: int
    steps: int


WORKLOADS = (
    Workload(f"{EQUAL_TOKENS} tokens each", False, ">= 1.0", 256, 9),
    Workload(f"lognormal, up to {LONGEST}", True, ">= 1.5", 32, 6),
)


def lengths(workload: Workload, step: int) -> np.ndarray:
    """Response tokens of every row of a step, int64 [RESPONSES]; another draw in every step."""
    if not workload.long_tailed:
        return np.full(RESPONSES, EQUAL_TOKENS, np.int64)
    drawn = np.random.default_rng(step).lognormal(np.log(MEDIAN_TOKENS), SIGMA, RESPONSES)
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


def schedule() -> list[np.ndarray]:
    """Lengths of every step, one workload after the other."""
    return [lengths(workload, step) for workload in WORKLOADS for step in range(workload.steps)]


def digit_share(text: str) -> float:
    """The reward: varies within every group, whatever the model."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def reward(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """digit_share with the signature that `reward.function` takes."""
    del data_source, ground_truth, extra_info
    return digit_share(solution_str)
