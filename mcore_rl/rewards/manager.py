"""The Rewarder of a rollout process: grades responses in child processes and adds the overlong penalty."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mcore_rl.config.reward import BATCH, GROUP, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rewards.batches import Batches
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.overlong import SoftOverlong
from mcore_rl.rewards.processes.pool import GradingPool
from mcore_rl.types import Prompt, Score


class RewardManager:
    """Implementation of ports.Rewarder on child processes, which start with this object.

    Grading of a response starts when it is submitted and overlaps with generation.

    Raises: ConfigError for reward.overlong here, and for reward.function from submit, collect and wait_ready.
    """

    def __init__(self, config: RewardConfig, *, max_response_tokens: int, sandbox: SandboxConfig | None = None) -> None:
        self._overlong = SoftOverlong.of(config, max_response_tokens)
        self._weight = config.weight
        self._batches = Batches() if config.manager == BATCH else None
        self._whole_tasks = config.batch != GROUP  # reward.batch=step submits a step as one task (rewards.step_grading)
        self._response_tokens: dict[int, int] = {}
        self._pool = GradingPool(config, sandbox)

    def wait_ready(self) -> None:
        """Wait until every grading process has loaded its grader."""
        self._pool.wait_ready()

    def submit(
        self,
        key: int,
        prompt: Prompt,
        response_text: str,
        response_tokens: int,
        *,
        group: Collection[int] = (),
        task: Collection[int] = (),
    ) -> None:
        """Start grading without waiting for it. `key` must not be pending (submitted but not collected).

        With reward.manager=batch, grading starts when all responses of the batch are submitted; `group` and `task` are
        the keys of the response's group and task (see reward.batch).
        """
        if key in self._response_tokens:
            raise ValueError(f"key {key} was submitted before and has not been collected")
        sample = Sample(prompt.data_source, response_text, prompt.ground_truth, prompt.extra_info)
        members = self._members(key, group, task)
        whole = {key: sample} if self._batches is None else self._batches.add(key, sample, members)
        if whole is not None:
            self._pool.submit(whole)
        self._response_tokens[key] = response_tokens

    def withdraw(self, key: int, *, group: Collection[int] = (), task: Collection[int] = ()) -> None:
        """Remove a response that will not be submitted from its batch, so that the batch does not wait for it."""
        if self._batches is not None:
            whole = self._batches.withdraw(key, self._members(key, group, task))
            if whole is not None:
                self._pool.submit(whole)

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        """Block until the submitted `keys` are scored; returns {key: Score}.

        reward.weight and the overlong penalty change the reward, never the accuracy. They do not apply to responses
        whose grading failed.
        """
        scores = self._pool.collect(keys)
        return {key: self._shaped(score, self._response_tokens.pop(key)) for key, score in scores.items()}

    def shutdown(self) -> None:
        """Stop the grading processes and drop pending responses. Repeated calls are allowed."""
        self._pool.shutdown()

    def _members(self, key: int, group: Collection[int], task: Collection[int]) -> Collection[int]:
        return (task if self._whole_tasks else group) or (key,)

    def _shaped(self, score: Score, response_tokens: int) -> Score:
        if score.error is not None:
            return score
        punishment = self._overlong.reward(response_tokens) if self._overlong is not None else 0.0
        return replace(score, reward=self._weight * score.reward + punishment)
