"""An episode whose length is drawn from its seed: the same in every run, whatever the policy has learned."""

from __future__ import annotations

import numpy as np

from mcore_rl.rollout.episodes.session import EpisodePrompt, Session

SIGMA = 0.8
"""Of lognormal lengths; with a median of 48, cut at 256, the mean is 64, and of 32 the longest has 219 on average."""


def length_of(seed: int, median: float, longest: int) -> int:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), SIGMA)
    return int(np.clip(drawn, 1, longest))


async def run(session: Session, prompt: EpisodePrompt, median: str, longest: str) -> None:
    """One turn; the end token must be one that the model never draws."""
    length = length_of(session.seed, float(median), int(longest))
    await session.generate(prompt.token_ids, {"max_response_tokens": length})
