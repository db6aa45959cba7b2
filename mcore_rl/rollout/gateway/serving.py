"""Requests without a session: a model that is served and not trained."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.episodes.limits import EpisodeLimits
from mcore_rl.rollout.episodes.player import EpisodePlayer
from mcore_rl.rollout.episodes.session import Session
from mcore_rl.rollout.episodes.single_turn import Attempt
from mcore_rl.rollout.episodes.trace import EpisodeTrace
from mcore_rl.rollout.gateway.answers import Answers
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.types import GenerationRequest, Prompt, SamplingOptions

NO_ROW = Prompt(0, np.zeros(0, np.int32), "", "", "", messages=[])
MAX_SEED = 2**63


@dataclass
class ServedRequests:
    """Makes the answers of single requests. Conversations are rendered whole, and sampling follows the requests."""

    player: EpisodePlayer
    episode: GatewayEpisode
    rollout: RolloutConfig

    def answers(self) -> Answers:
        """Return the answers of one request, with a random seed."""
        rollout = self.rollout
        options = SamplingOptions(
            rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            stop=tuple(rollout.stop),
        )
        name = f"serve.{secrets.token_hex(8)}"
        attempt = Attempt(
            GenerationRequest(name, NO_ROW.token_ids, secrets.randbelow(MAX_SEED), options), NO_ROW, trained=False
        )
        limits = EpisodeLimits(rollout, rollout.max_response_tokens, sys.maxsize)
        trace = EpisodeTrace(name, lambda *span: None, set())
        session = Session(self.player.context, self.player.client.generate, attempt, limits, trace)
        return Answers(session, self.episode.context_of(session), obeys=True, keeps_history=False)
