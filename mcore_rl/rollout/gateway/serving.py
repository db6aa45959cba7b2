"""Requests without a session: a model that is served and not trained."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.episodes.limits import EpisodeLimits
from mcore_rl.rollout.episodes.player import AttemptClient, EpisodePlayer
from mcore_rl.rollout.episodes.session import Session
from mcore_rl.rollout.episodes.single_turn import Attempt
from mcore_rl.rollout.episodes.trace import EpisodeTrace
from mcore_rl.rollout.gateway.answers import Answers
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.wire import ServedCall
from mcore_rl.rollout.journal import JournaledResponse, read_lost_journal
from mcore_rl.types import GenerationRequest, Prompt, SamplingOptions

NO_ROW = Prompt(0, np.zeros(0, np.int32), "", "", "", messages=[])


@dataclass
class ServedRequests:
    """Makes the answers of single requests. Conversations are rendered whole, and sampling follows the requests."""

    player: EpisodePlayer
    episode: GatewayEpisode
    rollout: RolloutConfig

    async def answers(self, call: ServedCall) -> Answers:
        """Return the answers of one request. They continue from the tokens of lost engines."""
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
        attempt = Attempt(GenerationRequest(call.name, NO_ROW.token_ids, call.seed, options), NO_ROW, trained=False)
        recovered: dict[str, JournaledResponse] = {}
        for journal in call.journals:  # in a thread: reading a large journal must not hold up other requests
            recovered |= (await asyncio.to_thread(read_lost_journal, journal)).get(call.name, {})
        client = AttemptClient(self.player.client, recovered, call.name, lambda: None)
        limits = EpisodeLimits(rollout, rollout.max_response_tokens, sys.maxsize)
        trace = EpisodeTrace(call.name, lambda *span: None, set())
        session = Session(self.player.context, client.generate, attempt, limits, trace)
        return Answers(session, self.episode.context_of(session), obeys=True, keeps_history=False)

    def end(self, call: ServedCall) -> None:
        """Release the tokens of a request in the journal."""
        self.player.client.loop.release([call.name])

    def fail(self, error: Exception) -> None:
        """End the process of the engine: without its connection it would be idle."""
        self.player.client.loop.die(WorkerDiedError(f"the connection to the gateway has failed: {error!r}"))
