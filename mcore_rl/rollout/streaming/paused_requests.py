"""Pausing of responses that have sampled all tokens allowed under the current weight version."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mcore_rl.types import Completion, Delta, GenerationRequest


@dataclass
class LimitedRequest:
    """Running request with a limit. `left`: tokens that it may sample before it pauses."""

    request: GenerationRequest
    sampled: int
    left: float


class PausedRequests:
    """Requests of one engine with a limit (GenerationRequest.tokens_per_version) or prescribed versions (spans):
    remaining tokens of running requests, and paused requests. Other requests are ignored and cost nothing."""

    def __init__(self) -> None:
        self._running: dict[str, LimitedRequest] = {}
        self._paused: dict[str, GenerationRequest] = {}
        """Paused requests in the order of pausing, each with its partial response."""

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def can_resume(self) -> bool:
        """True if a paused request could continue with the current weights."""
        return any(not request.spans for request in self._paused.values())

    @property
    def fewest_left(self) -> float:
        """Smallest number of tokens that a running request may sample before it pauses; inf without limits."""
        return min((limited.left for limited in self._running.values()), default=math.inf)

    def add(self, requests: Sequence[GenerationRequest], version: int) -> list[str]:
        """Register running requests with weights of `version`; returns the ids of requests that must pause at once."""
        full = []
        for request in requests:
            if request.tokens_per_version is not None or request.spans:
                sampled = 0 if request.partial is None else len(request.partial.token_ids)
                left = _remaining(request, sampled, version)
                self._running[request.request_id] = LimitedRequest(request, sampled, left)
                if left <= 0:
                    full.append(request.request_id)
        return full

    def count(self, deltas: Sequence[Delta], version: int) -> list[str]:
        """Count sampled tokens; returns the ids of requests that reached their limit for weights of `version`.

        An engine may return tokens of earlier weights after an update (RankEngine.begin_update).
        """
        reached = []
        # Most runs have no limits; they must not pay for every token here.
        for delta in deltas if self._running else ():
            if (limited := self._running.get(delta.request_id)) is not None:
                limited.sampled += len(delta.token_ids)
                if delta.version == version:
                    limited.left -= len(delta.token_ids)
                else:
                    limited.left = _remaining(limited.request, limited.sampled, version)
                if limited.left <= 0:
                    reached.append(delta.request_id)
        return reached

    def pause(self, partial: Sequence[Completion]) -> None:
        """Pause requests that the engine has aborted, with their partial responses."""
        for completion in partial:
            request = self._running.pop(completion.request_id).request
            self._paused[completion.request_id] = replace(request, partial=completion)

    def resume(self, version: int) -> list[GenerationRequest]:
        """Return the requests that may continue with weights of `version`; they count as running."""
        requests = [
            request
            for request in self._paused.values()
            if request.partial is None or _remaining(request, len(request.partial.token_ids), version) > 0
        ]
        for request in requests:
            del self._paused[request.request_id]
        self.add(requests, version)
        return requests

    def set_version(self, version: int) -> None:
        """Reset the limits of running requests for weights of `version`."""
        for limited in self._running.values():
            limited.left = _remaining(limited.request, limited.sampled, version)

    def remove(self, request_ids: Collection[str]) -> list[Completion]:
        """Remove requests that have ended; returns the partial responses of paused ones."""
        partial = []
        for request_id in request_ids:
            self._running.pop(request_id, None)
            if (request := self._paused.pop(request_id, None)) is not None and request.partial is not None:
                partial.append(request.partial)
        return partial


def _remaining(request: GenerationRequest, sampled: int, version: int) -> float:
    """Return how many more tokens a response may sample with weights of `version`."""
    if not request.spans:
        return math.inf if request.tokens_per_version is None else request.tokens_per_version
    # The next span with a later version starts at token `first`; until there, the current version may sample.
    return next((first - sampled for of_span, first, _ in request.spans if of_span > version), math.inf)
