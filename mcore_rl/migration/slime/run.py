"""Facts about a slime run that several translations need."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.migration.draft import Draft
from mcore_rl.migration.slime.reader import PROGRAM
from mcore_rl.migration.source import Source

PROMPT_TOKENS = 2048
"""Prompt limit of a run without --rollout-max-prompt-len."""
FULLY_ASYNCHRONOUS = "fully_async"


@dataclass
class SlimeRun:
    """A slime run under translation. rows: number of training prompts; None if unknown."""

    source: Source
    draft: Draft
    rows: int | None = None

    @property
    def is_supervised(self) -> bool:
        return self.source.text("loss-type") == "sft_loss"

    @property
    def is_asynchronous(self) -> bool:
        """True for train_async.py, which generates the next batch during an update."""
        return "train_async" in (self.source.text(PROGRAM) or "") and not self.is_supervised

    @property
    def is_fully_asynchronous(self) -> bool:
        return FULLY_ASYNCHRONOUS in (self.source.text("rollout-function-path") or "")

    @property
    def samples(self) -> int:
        """Responses per prompt."""
        return 1 if self.is_supervised else max(self.source.integer("n-samples-per-prompt"), 1)

    @property
    def prompts_per_step(self) -> int:
        return max(self.source.integer("rollout-batch-size"), 1)

    @property
    def responses_per_update(self) -> int:
        """Responses of one optimizer update."""
        total = self.prompts_per_step * self.samples
        steps = self.source.integer("num-steps-per-rollout")
        return total // steps if steps > 0 else self.source.integer("global-batch-size") or total

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.draft.integer("rollout.max_prompt_tokens") + self.draft.integer("rollout.max_response_tokens")
