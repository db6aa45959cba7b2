"""What becomes of responses that could not be graded: the first is shown, and too many end the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mcore_rl.config.reward import RewardConfig
from mcore_rl.errors import RewardError
from mcore_rl.types import RolloutScalars

FAILED_EPISODE = "the episode failed"
"""How the errors of responses begin whose episode raised."""


@dataclass
class GradingFailures:
    """Of one run; `note` shows a text to whoever watches it."""

    config: RewardConfig
    note: Callable[[str], None]
    _shown: bool = field(default=False, init=False)

    def check(self, graded: Sequence[RolloutScalars], what: str, records: str) -> None:
        """Looks at all responses of `what` ("step 3"), which `records` holds.

        Raises: RewardError where reward.max_error_fraction of them, and at least one, could not be graded.
        """
        errors = [message for scalars in graded for _, message in scalars.errors]
        if not errors:
            return
        told, responses = self._told(errors[0]), sum(len(scalars.rewards) for scalars in graded)
        if not self._shown:
            self._shown = True
            traceback = next((scalars.traceback for scalars in graded if scalars.traceback), None)
            counted = "it counts 0; later ones are only counted (reward/errors) and recorded"
            self.note(f"warning: {told}: {errors[0]}; {counted}" + (f"\n{traceback}" if traceback else ""))
        if len(errors) >= self.config.max_error_fraction * responses:
            raise RewardError(
                f"{told} failed on {len(errors)} of {responses} responses of {what}, and reward.max_error_fraction="
                f"{self.config.max_error_fraction:g} ends the run; the first: {errors[0]}; all are in {records}"
            )

    def _told(self, error: str) -> str:
        return "rollout.episode" if error.startswith(FAILED_EPISODE) else self.config.chosen
