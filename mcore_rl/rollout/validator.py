"""Accuracy on held-out prompts, through the same engines and graders as training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.batching import of_episodes
from mcore_rl.data.records import join_parts, part_path
from mcore_rl.ports import Validator
from mcore_rl.rollout.collector import RolloutPool
from mcore_rl.rollout.failures import GradingFailures
from mcore_rl.rollout.router import cut
from mcore_rl.types import RolloutScalars, RolloutTask, SamplingOptions


@dataclass
class RolloutValidator:
    """rollout.validation_samples responses to each of the first `num_prompts` validation prompts.

    A response's seed comes from (seed, prompt, sample) alone: validations of one run differ by the weights only.
    """

    pool: RolloutPool
    num_prompts: int
    rollout: RolloutConfig
    seed: int
    records_dir: Path
    failures: GradingFailures | None = None

    def validate(self, step: int) -> RolloutScalars:
        """Scalars of all responses, in the order of the prompts; the group id is the number of the prompt."""
        name = f"val_step_{step}"
        options = self.rollout
        sampling = SamplingOptions(
            options.max_response_tokens, options.validation_temperature, options.validation_top_p
        )
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
        results = [of_episodes(scalars) for _, scalars in self.pool.run(tasks)]
        join_parts([str(task.records) for task in tasks], self.records_dir, name)
        if self.failures is not None:
            self.failures.check(results, f"data.val after step {step}", f"rollouts/{name}.jsonl")
        return _concatenate(results)


def _joined_parts(parts: list[RolloutScalars]) -> dict[str, np.ndarray]:
    """Numbers beside the scores, of every name that any engine's responses have."""
    names = sorted({name for part in parts for name in part.parts})
    lacking = [np.full(len(part.rewards), np.nan) for part in parts]
    return {
        name: np.concatenate([part.parts.get(name, none) for part, none in zip(parts, lacking, strict=True)])
        for name in names
    }


def _concatenate(parts: list[RolloutScalars]) -> RolloutScalars:
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(RolloutScalars)
        if isinstance(getattr(parts[0], field.name), np.ndarray)
    }
    starts = np.cumsum([0, *(len(part.rewards) for part in parts)]).tolist()
    errors = [(start + i, text) for start, part in zip(starts, parts, strict=False) for i, text in part.errors]
    return RolloutScalars(
        **arrays,
        errors=tuple(errors),
        scores={name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores},
        parts=_joined_parts(parts),
        traceback=next((part.traceback for part in parts if part.traceback), None),
        seconds_generating=max(part.seconds_generating for part in parts),
        seconds_grading=max(part.seconds_grading for part in parts),
    )


if TYPE_CHECKING:
    _port: type[Validator] = RolloutValidator
