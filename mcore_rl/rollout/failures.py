"""Handling of responses that could not be graded: the first is shown, and too many end the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mcore_rl.config.reward import RewardConfig
from mcore_rl.errors import RewardError
from mcore_rl.types import RolloutScalars

FAILED_EPISODE = "the episode failed"
"""Prefix of error messages for failed episodes."""


@dataclass
class GradingFailures:
    """Grading failures of one run; `note` prints a text to the user."""

    config: RewardConfig
    note: Callable[[str], None]
    _shown: bool = field(default=False, init=False)

    def check(self, graded: Sequence[RolloutScalars], what: str, records: str) -> None:
        """Check all responses of `what` (such as "step 3"), which are in the file `records`.

        Raises: RewardError if at least one, and reward.max_error_fraction of them, could not be graded.
        """
        errors = [message for scalars in graded for _, message in scalars.errors]
        if not errors:
            return
        source, responses = self._source(errors[0]), sum(len(scalars.rewards) for scalars in graded)
        if not self._shown:
            self._shown = True
            traceback = next((scalars.traceback for scalars in graded if scalars.traceback), None)
            counted = "its reward is 0; later failures are only counted (reward/errors) and recorded"
            self.note(f"warning: {source}: {errors[0]}; {counted}" + (f"\n{traceback}" if traceback else ""))
        if len(errors) >= self.config.max_error_fraction * responses:
            raise RewardError(
                f"{source} failed on {len(errors)} of {responses} responses of {what}, which reaches "
                f"reward.max_error_fraction={self.config.max_error_fraction:g}; first error: {errors[0]}; all errors "
                f"are in {records}"
            )

    def _source(self, error: str) -> str:
        return "rollout.episode" if error.startswith(FAILED_EPISODE) else self.config.chosen
