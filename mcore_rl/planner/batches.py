"""The arithmetic of one step's batch: responses, tokens, micro-batches and updates.

Lengths are expectations: plan.mean_response_fraction of rollout.max_response_tokens, and the same fraction of
rollout.max_prompt_tokens. A rank's micro-batches are its tokens over the budget, at least the whole sequences that
one row takes, rounded up as the interleaved schedule wants them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mcore_rl.config.schema import Config
from mcore_rl.planner.engine import longest_sequence
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class BatchArithmetic:
    """Of one step. Lengths are in tokens; `microbatches` are those of one rank in one update, `most_microbatches` if
    every sequence had full length."""

    responses: int
    updates: int
    responses_per_update: int
    responses_per_rank: float
    mean_prompt: float
    mean_response: float
    microbatches: int
    most_microbatches: int

    @property
    def mean_tokens(self) -> float:
        """Of a sequence."""
        return self.mean_prompt + self.mean_response

    @property
    def tokens(self) -> float:
        """Of all sequences of a step."""
        return self.responses * self.mean_tokens


def batch_arithmetic(config: Config, layout: TrainLayout) -> BatchArithmetic:
    """What one step does, of expected lengths."""
    trainer, rollout = config.trainer, config.rollout
    responses = trainer.prompts_per_step * rollout.samples_per_prompt
    per_update = trainer.prompts_per_update * rollout.samples_per_prompt
    fraction = config.plan.mean_response_fraction
    prompt, response = rollout.max_prompt_tokens * fraction, rollout.max_response_tokens * fraction
    row = config.actor.tokens_per_microbatch
    return BatchArithmetic(
        responses=responses,
        updates=trainer.prompts_per_step // trainer.prompts_per_update * trainer.update_epochs,
        responses_per_update=per_update,
        responses_per_rank=per_update / layout.dp,
        mean_prompt=prompt,
        mean_response=response,
        microbatches=num_microbatches(per_update, row, layout, prompt + response),
        most_microbatches=num_microbatches(per_update, row, layout, longest_sequence(rollout)),
    )


def num_microbatches(responses: int, row_tokens: int, layout: TrainLayout, length: float) -> int:
    """Return the micro-batches of one rank in an update on `responses` sequences of `length` tokens each."""
    per_row = max(int(row_tokens // length), 1)
    count = max(ceil(responses / layout.dp / per_row), 1)
    return count if layout.vpp is None else ceil(count / layout.pp) * layout.pp
