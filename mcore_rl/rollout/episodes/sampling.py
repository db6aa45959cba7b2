"""Interface between sessions of episodes and the client of their engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from mcore_rl.errors import DataError
from mcore_rl.rollout.reported_requests import Report
from mcore_rl.types import Completion, GenerationRequest, JsonFormat, SamplingOptions

ReportOf = Callable[[GenerationRequest], Report | None]
"""Function that returns the receiver of a request's tokens; None: only the completion is needed."""


class Sample(Protocol):
    """Generates the response to a request. Cancelling the call aborts the request. `report` receives tokens while they
    are sampled; the completion has all of them, also those that were not reported."""

    def __call__(self, request: GenerationRequest, *, report: Report | None = None) -> Awaitable[Completion]: ...


def with_format(options: SamplingOptions, form: JsonFormat | None, *, trained: bool) -> SamplingOptions:
    """Return the options of a turn with a format. `trained`: the turn is trained on.

    Raises: DataError for a trained turn whose sampling sets are not recorded.
    """
    if form is None:
        return options
    if trained and not options.keep_mask:
        raise DataError(
            "a format of replies changes the sampling distribution, which the trainer models only with "
            "rollout.keep_sampling_mask=true; set it, or leave out the format"
        )
    return replace(options, format=form)
