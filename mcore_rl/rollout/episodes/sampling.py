"""Interface between sessions of episodes and the client of their engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from mcore_rl.rollout.reported_requests import Report
from mcore_rl.types import Completion, GenerationRequest

ReportOf = Callable[[GenerationRequest], Report | None]
"""Function that returns the receiver of a request's tokens; None: only the completion is needed."""


class Sample(Protocol):
    """Generates the response to a request. Cancelling the call aborts the request. `report` receives tokens while they
    are sampled; the completion has all of them, also those that were not reported."""

    def __call__(self, request: GenerationRequest, *, report: Report | None = None) -> Awaitable[Completion]: ...
