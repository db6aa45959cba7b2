"""Result of an engine step. Without imports of the project: SGLang's ranks return it from their own environment."""

from __future__ import annotations

from typing import NamedTuple


class StepOutput(NamedTuple):
    """Tokens that one or several steps added to a request, identified by the engine's own id.

    finish_reason: see Completion; None while the request is running.
    """

    # A tuple, because one is created per token: a frozen dataclass takes three times as long.

    engine_id: str
    token_ids: list[int]
    logp: list[float]
    finish_reason: str | None

    def followed_by(self, later: StepOutput) -> StepOutput:
        """Return the result of this step and a later one of the same request."""
        return StepOutput(self.engine_id, self.token_ids + later.token_ids, self.logp + later.logp, later.finish_reason)
