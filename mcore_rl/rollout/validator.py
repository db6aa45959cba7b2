"""Responses that no step trains: validation with the same engines and graders as training, and probes of engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.batching import one_row_per_episode
from mcore_rl.data.records import join_parts, part_path
from mcore_rl.rollout.collector import RolloutPool, training_sampling
from mcore_rl.rollout.results import GradingFailures, join_scalars
from mcore_rl.rollout.tasks import split
from mcore_rl.types import RolloutScalars, RolloutTask, SamplingOptions

PROBE = "probe"
"""Name of this prompt set on engines; the request ids start with it."""
MAX_TOKENS = 32
"""Length limit of a response: 4 prompts give about 100 tokens, enough for a mean, in less than a second."""


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
    failures: GradingFailures

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
            options.validation_min_p,
            options.validation_repetition_penalty,
        )
        # Prompts are the groups: their numbers serve as rows and as group ids.
        rows = np.arange(self.num_prompts)
        task = RolloutTask("val", rows, rows, options.validation_samples, sampling, self.seed)
        # One file per task, because engines write them concurrently; `join_parts` joins them in order.
        records = partial(part_path, self.records_dir, name, 0)
        tasks = split(task, self.pool.num_engines, options.max_concurrent_requests, records)
        results = [one_row_per_episode(scalars) for _, scalars in self.pool.run(tasks)]
        join_parts([str(task.records) for task in tasks], self.records_dir, name)
        self.failures.check(results, f"data.val after step {step}", f"rollouts/{name}.jsonl")
        return join_scalars(results)


def probe_task(prompt_tokens: np.ndarray, rollout: RolloutConfig, seed: int, num_prompts: int) -> RolloutTask:
    """Return the task of a probe: short ungraded responses to `num_prompts` training prompts, to compare
    log-probabilities before training. They use the sampling options of training, and share no id, journal entry or
    record with responses of steps. Prompts range from the longest to the shortest; they repeat if there are too few.

    Shapes: prompt_tokens int64 [N], the length of every training prompt.
    """
    sampling = training_sampling(rollout)
    sampling = replace(sampling, max_response_tokens=min(MAX_TOKENS, sampling.max_response_tokens))
    # Long and short prompts, because some errors, such as a wrong attention window, depend on the length.
    longest_first = np.argsort(-prompt_tokens, kind="stable")
    rows = longest_first[np.linspace(0, len(longest_first) - 1, num_prompts).astype(np.int64)]
    return RolloutTask(PROBE, rows, np.arange(num_prompts), 1, sampling, seed)
