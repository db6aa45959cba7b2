"""Responses that have drawn enough under one version of the weights, and give their places to others."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mcore_rl.types import Completion, Delta, GenerationRequest


@dataclass
class Counted:
    """A request that runs; `left`: tokens that it may draw before it waits."""

    request: GenerationRequest
    drawn: int
    left: float


class Parking:
    """Of the requests of one engine that have a limit (GenerationRequest.tokens_per_version), or whose versions are
    given (spans): what each may still draw, and those that wait. Others are passed over. Costs what is drawn, and
    nothing where there are no such requests."""

    def __init__(self) -> None:
        self._running: dict[str, Counted] = {}
        self._waiting: dict[str, GenerationRequest] = {}
        """In the order in which they came, each with what there is of its response."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def may_go_on(self) -> bool:
        """Whether some of those that wait need no other weights to go on."""
        return any(not request.spans for request in self._waiting.values())

    def begin(self, requests: Sequence[GenerationRequest], version: int) -> list[str]:
        """They run from now on, with weights of `version`; the ids of those that are to wait at once."""
        for request in requests:
            if request.tokens_per_version is not None or request.spans:
                drawn = 0 if request.partial is None else len(request.partial.token_ids)
                counted = Counted(request, drawn, _room(request, drawn, version))
                self._running[request.request_id] = counted
        return [request.request_id for request in requests if self._is_full(request.request_id)]

    def count(self, deltas: Sequence[Delta]) -> list[str]:
        """Takes note of what was drawn; the ids of those that have reached their limit."""
        reached = []
        for delta in deltas if self._running else ():
            if (counted := self._running.get(delta.request_id)) is not None:
                counted.drawn += len(delta.token_ids)
                counted.left -= len(delta.token_ids)
                if counted.left <= 0:
                    reached.append(delta.request_id)
        return reached

    def park(self, partial: Sequence[Completion]) -> None:
        """The engine has aborted them: they wait, with what there is of them."""
        for completion in partial:
            request = self._running.pop(completion.request_id).request
            self._waiting[completion.request_id] = replace(request, partial=completion)

    def go_on(self, version: int) -> list[GenerationRequest]:
        """Those that may go on with weights of `version`, which run from now on."""
        requests = [
            request
            for request in self._waiting.values()
            if request.partial is None or _room(request, len(request.partial.token_ids), version) > 0
        ]
        for request in requests:
            del self._waiting[request.request_id]
        self.begin(requests, version)
        return requests

    def weights_changed(self, version: int) -> None:
        """What runs may draw as much again."""
        for counted in self._running.values():
            counted.left = _room(counted.request, counted.drawn, version)

    def leave(self, request_ids: Collection[str]) -> list[Completion]:
        """They have ended, or are ended; what there is of those that wait."""
        partial = []
        for request_id in request_ids:
            self._running.pop(request_id, None)
            if (request := self._waiting.pop(request_id, None)) is not None and request.partial is not None:
                partial.append(request.partial)
        return partial

    def _is_full(self, request_id: str) -> bool:
        return (counted := self._running.get(request_id)) is not None and counted.left <= 0


def _room(request: GenerationRequest, drawn: int, version: int) -> float:
    """Tokens that a response may draw with weights of `version` beyond those that it has."""
    if not request.spans:
        return math.inf if request.tokens_per_version is None else request.tokens_per_version
    return next((first - drawn for of_span, first, _ in request.spans if of_span > version), math.inf)
