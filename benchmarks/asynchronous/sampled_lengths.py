"""Episode whose length is sampled from its seed, so that it does not depend on the policy."""

from __future__ import annotations

import numpy as np

from mcore_rl.rollout.episodes.session import EpisodePrompt, Session

SIGMA = 0.8
"""Standard deviation of the lognormal distribution. With median 48 and maximum 256 the mean is 64, and the mean of the
longest of 32 lengths is 219."""


def length_of(seed: int, median: float, longest: int) -> int:
    sampled = np.random.default_rng(seed).lognormal(np.log(median), SIGMA)
    return int(np.clip(sampled, 1, longest))


async def run(session: Session, prompt: EpisodePrompt, median: str, longest: str) -> None:
    """Run one turn. The model must never sample the end token."""
    length = length_of(session.seed, float(median), int(longest))
    await session.generate(prompt.token_ids, {"max_response_tokens": length})
