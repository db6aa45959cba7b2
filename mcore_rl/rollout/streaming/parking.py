"""Responses that have drawn enough under one version of the weights, and give their places to others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mcore_rl.types import Completion, Delta, GenerationRequest


class Parking:
    """Of the requests of one engine that have a limit (GenerationRequest.tokens_per_version): what each may still draw,
    and those that wait. Others are passed over. Costs what is drawn, and nothing where no request has a limit."""

    def __init__(self) -> None:
        self._running: dict[str, GenerationRequest] = {}
        self._left: dict[str, int] = {}
        """Tokens that those may draw before they wait."""
        self._waiting: dict[str, GenerationRequest] = {}
        """In the order in which they came, each with what there is of its response."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """They run from now on."""
        for request in requests:
            if request.tokens_per_version is not None:
                self._running[request.request_id] = request
                self._left[request.request_id] = request.tokens_per_version

    def count(self, deltas: Sequence[Delta]) -> list[str]:
        """Takes note of what was drawn; the ids of those that have reached their limit."""
        reached = []
        for delta in deltas if self._left else ():
            if (left := self._left.get(delta.request_id)) is not None:
                self._left[delta.request_id] = left - len(delta.token_ids)
                if left <= len(delta.token_ids):
                    reached.append(delta.request_id)
        return reached

    def park(self, partial: Sequence[Completion]) -> None:
        """The engine has aborted them: they wait, with what there is of them."""
        for completion in partial:
            del self._left[completion.request_id]
            request = self._running.pop(completion.request_id)
            self._waiting[completion.request_id] = replace(request, partial=completion)

    def go_on(self) -> list[GenerationRequest]:
        """All that wait, which run from now on."""
        requests, self._waiting = list(self._waiting.values()), {}
        self.begin(requests)
        return requests

    def weights_changed(self) -> None:
        """What runs may draw as much again."""
        self.begin(list(self._running.values()))

    def leave(self, request_ids: Collection[str]) -> list[Completion]:
        """They have ended, or are ended; what there is of those that wait."""
        partial = []
        for request_id in request_ids:
            self._running.pop(request_id, None)
            self._left.pop(request_id, None)
            if (request := self._waiting.pop(request_id, None)) is not None and request.partial is not None:
                partial.append(request.partial)
        return partial
