"""Workload of both sides of benchmarks.whole_step.step: number and lengths of the responses of each step.

The peer imports it in its own environment, so it needs only numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PROMPTS, SAMPLES = 32, 8
RESPONSES = PROMPTS * SAMPLES
EQUAL_TOKENS = 16
"""Length of every response in the workload without long tails."""
LONGEST = 256
MEDIAN_TOKENS, SIGMA = 48.0, 0.8
"""Parameters of the lognormal lengths, clipped at LONGEST. The mean is 64; nearly every step has a response of
LONGEST."""
WARM_UP = 2
"""Steps that are not measured."""
LEARNING_RATE = 1e-6
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class LengthWorkload:
    """Lengths of a benchmark. `aim`: target of the peer's seconds divided by ours. `peer_microbatch`: TRL's fastest
    micro-batch size of 16 to 256 responses; TRL pads, so with long tails large micro-batches are mostly padding. The
    first WARM_UP of `steps` do not count."""

    name: str
    long_tailed: bool
    aim: str
    peer_microbatch: int
    steps: int


WORKLOADS = (
    LengthWorkload(f"{EQUAL_TOKENS} tokens each", False, ">= 1.0", 256, 9),
    LengthWorkload(f"lognormal, up to {LONGEST}", True, ">= 4.0", 32, 6),
)


def lengths(workload: LengthWorkload, step: int) -> np.ndarray:
    """Return the response lengths of a step, int64 [RESPONSES]; they differ between steps."""
    if not workload.long_tailed:
        return np.full(RESPONSES, EQUAL_TOKENS, np.int64)
    # Seeded by the step: both sides compute the same lengths in different processes.
    drawn = np.random.default_rng(step).lognormal(np.log(MEDIAN_TOKENS), SIGMA, RESPONSES)
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


def schedule() -> list[np.ndarray]:
    """Return the lengths of every step, one workload after the other."""
    return [lengths(workload, step) for workload in WORKLOADS for step in range(workload.steps)]


def digit_share(text: str) -> float:
    """Return the reward: the fraction of digits, which varies within every group for any model."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def reward(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """Adapt digit_share to the signature of `reward.function`."""
    del data_source, ground_truth, extra_info
    return digit_share(solution_str)
