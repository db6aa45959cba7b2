"""Number of responses, tokens, micro-batches and updates of one training step.

Sequence lengths are expectations: plan.mean_response_fraction times rollout.max_prompt_tokens and
rollout.max_response_tokens. A micro-batch is one packed row of whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mcore_rl.config.schema import PlanConfig, RolloutConfig, TrainerConfig
from mcore_rl.planner.engine import longest_sequence
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class BatchArithmetic:
    """Sizes of one training step. Lengths are in tokens.

    `microbatches` counts the micro-batches of one rank in one update, for sequences of mean length.
    `most_microbatches` is the same number for sequences of full length.
    """

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
        """Mean length of a sequence."""
        return self.mean_prompt + self.mean_response

    @property
    def tokens(self) -> float:
        """Tokens of all sequences of a step."""
        return self.responses * self.mean_tokens


def batch_arithmetic(
    trainer: TrainerConfig, rollout: RolloutConfig, plan: PlanConfig, row: int, layout: TrainLayout
) -> BatchArithmetic:
    """Compute the sizes of one training step. `row` is actor.tokens_per_microbatch."""
    responses = trainer.prompts_per_step * rollout.samples_per_prompt
    per_update = trainer.prompts_per_update * rollout.samples_per_prompt
    fraction = plan.mean_response_fraction
    prompt, response = rollout.max_prompt_tokens * fraction, rollout.max_response_tokens * fraction
    return BatchArithmetic(
        responses=responses,
        # Every epoch repeats all updates of the step.
        updates=trainer.prompts_per_step // trainer.prompts_per_update * trainer.update_epochs,
        responses_per_update=per_update,
        responses_per_rank=per_update / layout.dp,
        mean_prompt=prompt,
        mean_response=response,
        microbatches=num_microbatches(per_update, row, layout, prompt + response),
        most_microbatches=num_microbatches(per_update, row, layout, longest_sequence(rollout)),
    )


def num_microbatches(responses: int, row_tokens: int, layout: TrainLayout, length: float) -> int:
    """Count one rank's micro-batches in an update on `responses` sequences of `length` tokens each.

    The interleaved schedule needs a multiple of the number of pipeline stages.
    """
    # Sequences are never split. validate() ensures that a row holds at least one.
    per_row = max(int(row_tokens // length), 1)
    count = max(ceil(responses / layout.dp / per_row), 1)
    return count if layout.vpp is None else ceil(count / layout.pp) * layout.pp
