"""Validation with the same engines and graders as training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.batching import one_row_per_episode
from mcore_rl.data.records import join_parts, part_path
from mcore_rl.ports import Validator
from mcore_rl.rollout.collector import RolloutPool
from mcore_rl.rollout.failures import GradingFailures
from mcore_rl.rollout.scalars import join_scalars
from mcore_rl.rollout.tasks import cut
from mcore_rl.types import RolloutScalars, RolloutTask, SamplingOptions


@dataclass
class RolloutValidator:
    """Generates rollout.validation_samples responses to each of the first `num_prompts` validation prompts.

    The seed of a response depends only on (seed, prompt, sample): validations of a run differ by the weights only.
    """

    pool: RolloutPool
    num_prompts: int
    rollout: RolloutConfig
    seed: int
    records_dir: Path
    failures: GradingFailures | None = None

    def validate(self, step: int) -> RolloutScalars:
        """Return the scalars of all responses in the order of the prompts; the group id is the number of the prompt."""
        name = f"val_step_{step}"
        options = self.rollout
        sampling = SamplingOptions(
            options.max_response_tokens,
            options.validation_temperature,
            options.validation_top_p,
            options.validation_top_k,
            tuple(options.stop),
        )
        # Prompts are the groups: their numbers serve as rows and as group ids.
        parts = cut(
            self.num_prompts, options.validation_samples, self.pool.num_engines, options.max_concurrent_requests
        )
        tasks = [
            RolloutTask(
                "val",
                rows,
                rows,
                options.validation_samples,
                sampling,
                self.seed,
                part_path(self.records_dir, name, 0, number),
            )
            for number, rows in enumerate(parts)
        ]
        results = [one_row_per_episode(scalars) for _, scalars in self.pool.run(tasks)]
        join_parts([str(task.records) for task in tasks], self.records_dir, name)
        if self.failures is not None:
            self.failures.check(results, f"data.val after step {step}", f"rollouts/{name}.jsonl")
        return join_scalars(results)


if TYPE_CHECKING:
    _port: type[Validator] = RolloutValidator
