"""Requests whose tokens are reported while they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mcore_rl.types import Delta, GenerationRequest

Report = Callable[[int, Delta], None]
"""Receiver of a request's new tokens: (number of response tokens before them, tokens)."""


@dataclass
class _ReportedRequest:
    report: Report
    position: int
    """Number of response tokens that the engine has."""


class ReportedRequests:
    """Requests of one engine whose tokens are reported. Other requests cost nothing."""

    def __init__(self) -> None:
        self._reported: dict[str, _ReportedRequest] = {}

    def add(self, requests: Sequence[GenerationRequest], report: Report) -> None:
        """Report the tokens of submitted requests. Tokens of their partial responses are not reported."""
        for request in requests:
            self._reported[request.request_id] = _ReportedRequest(report, _num_partial(request))

    def report(self, deltas: Sequence[Delta]) -> None:
        """Report the tokens of an engine step."""
        for delta in deltas if self._reported else ():
            if (reported := self._reported.get(delta.request_id)) is not None:
                reported.report(reported.position, delta)
                reported.position += len(delta.token_ids)

    def resume(self, requests: Sequence[GenerationRequest]) -> None:
        """Note that requests are submitted again. Tokens whose experts an abort has lost are sampled again."""
        for request in requests if self._reported else ():
            if (reported := self._reported.get(request.request_id)) is not None:
                reported.position = _num_partial(request)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Remove requests that have ended."""
        for request_id in request_ids if self._reported else ():
            self._reported.pop(request_id, None)


def _num_partial(request: GenerationRequest) -> int:
    return 0 if request.partial is None else len(request.partial.token_ids)
