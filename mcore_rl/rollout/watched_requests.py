"""Requests whose tokens are reported while they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mcore_rl.types import Delta, GenerationRequest

Report = Callable[[int, Delta], None]
"""Receiver of a request's new tokens: (number of response tokens before them, tokens)."""


@dataclass
class _Watched:
    report: Report
    position: int
    """Number of response tokens that the engine has."""


class WatchedRequests:
    """Watched requests of one engine. Other requests cost nothing."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def add(self, requests: Sequence[GenerationRequest], report: Report) -> None:
        """Watch submitted requests. Tokens of their partial responses are not reported."""
        for request in requests:
            self._watched[request.request_id] = _Watched(report, _num_partial(request))

    def report(self, deltas: Sequence[Delta]) -> None:
        """Report the tokens of an engine step."""
        for delta in deltas if self._watched else ():
            if (watched := self._watched.get(delta.request_id)) is not None:
                watched.report(watched.position, delta)
                watched.position += len(delta.token_ids)

    def resume(self, requests: Sequence[GenerationRequest]) -> None:
        """Note that requests are submitted again. Tokens whose experts an abort has lost are sampled again."""
        for request in requests if self._watched else ():
            if (watched := self._watched.get(request.request_id)) is not None:
                watched.position = _num_partial(request)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Remove requests that have ended."""
        for request_id in request_ids if self._watched else ():
            self._watched.pop(request_id, None)


def _num_partial(request: GenerationRequest) -> int:
    return 0 if request.partial is None else len(request.partial.token_ids)
