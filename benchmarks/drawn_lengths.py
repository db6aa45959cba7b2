"""An episode whose length is drawn from its seed: the same in every run, whatever the policy has learned."""

from __future__ import annotations

import numpy as np

from mcore_rl.rollout.episodes.session import EpisodePrompt, Session

MEDIAN_TOKENS, SIGMA, LONGEST = 48.0, 0.8, 256
"""Of lognormal lengths, cut at LONGEST: mean 64; of 32, the longest has 219 on average."""


def length_of(seed: int) -> int:
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), SIGMA)
    return int(np.clip(drawn, 1, LONGEST))


async def run(session: Session, prompt: EpisodePrompt) -> None:
    """One turn; the end token must be one that the model never draws."""
    await session.generate(prompt.token_ids, {"max_response_tokens": length_of(session.seed)})
