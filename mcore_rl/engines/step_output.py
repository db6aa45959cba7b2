"""Result of an engine step. Without imports of the project: SGLang's ranks return it from their own environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepOutput:
    """Tokens that a step added to one request, identified by the engine's own id.

    finish_reason: see Completion; None while the request is running.
    """

    engine_id: str
    token_ids: list[int]
    logp: list[float]
    finish_reason: str | None
