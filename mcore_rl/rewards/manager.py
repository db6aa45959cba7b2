"""The Rewarder of a rollout process: grades responses in child processes and adds the overlong penalty."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

from mcore_rl.config.reward import BATCH, GROUP, OverlongConfig, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.processes.pool import GradingPool
from mcore_rl.types import Prompt, Score


class RewardManager:
    """Implementation of ports.Rewarder on child processes, which start with this object.

    Grading of a response starts when it is submitted and overlaps with generation.

    Raises (from submit, collect and wait_ready): ConfigError for reward.function.
    """

    def __init__(self, config: RewardConfig, *, max_response_tokens: int, sandbox: SandboxConfig | None = None) -> None:
        self._config, self._max_response_tokens = config, max_response_tokens
        self._batches = Batches() if config.manager == BATCH else None
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
        if self._batches is None:
            self._pool.submit({key: sample})
        elif whole := self._batches.add(key, sample, self._members(key, group, task)):
            self._pool.submit(whole)
        # Last, so that no key stays pending if the pool refuses the sample.
        self._response_tokens[key] = response_tokens

    def withdraw(self, key: int, *, group: Collection[int] = (), task: Collection[int] = ()) -> None:
        """Remove a response that will not be submitted from its batch, so that the batch does not wait for it."""
        if self._batches is not None and (whole := self._batches.withdraw(key, self._members(key, group, task))):
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
        # reward.batch=step submits a step as one task (rewards.step_grading). A response without other members is a
        # batch of its own.
        return (group if self._config.batch == GROUP else task) or (key,)

    def _shaped(self, score: Score, response_tokens: int) -> Score:
        if score.error is not None:
            return score
        config, punishment = self._config, 0.0
        if config.punishes_overlong:
            punishment = soft_overlong(response_tokens, self._max_response_tokens, config.overlong)
        return replace(score, reward=config.weight * score.reward + punishment)


@dataclass
class _PartialBatch:
    samples: dict[int, Sample | None]
    """All keys of the batch in the order in which the function receives the responses; None for missing responses."""
    missing: int


class Batches:
    """Incomplete batches of responses, which a batch reward function grades in one call. Thread-safe.

    `add` and `withdraw` remove and return a batch that they complete, as {key: sample} in the batch's order. Otherwise
    they return an empty dict.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Batch of each response key.
        self._batches: dict[int, _PartialBatch] = {}

    def add(self, key: int, sample: Sample, members: Collection[int]) -> dict[int, Sample]:
        """Add a response.

        members: all keys of the batch, including `key`. Only the value given with the batch's first response counts.
        """
        with self._lock:
            batch = self._batch_of(key, members)
            batch.missing -= batch.samples[key] is None
            batch.samples[key] = sample
            return self._completed(batch)

    def withdraw(self, key: int, members: Collection[int]) -> dict[int, Sample]:
        """Remove a response that will not be submitted."""
        with self._lock:
            batch = self._batch_of(key, members)
            batch.missing -= batch.samples.pop(key) is None
            del self._batches[key]
            return self._completed(batch)

    def _batch_of(self, key: int, members: Collection[int]) -> _PartialBatch:
        if key not in self._batches:  # this is the first response of the batch
            if key not in members:
                raise ValueError(f"key {key} is not in its batch, which has the keys {list(members)[:8]}")
            batch = _PartialBatch(dict.fromkeys(members), len(members))
            self._batches |= dict.fromkeys(members, batch)
        return self._batches[key]

    def _completed(self, batch: _PartialBatch) -> dict[int, Sample]:
        if batch.missing:  # counted, since a batch may have all responses of a step
            return {}
        whole = {key: sample for key, sample in batch.samples.items() if sample is not None}
        for key in whole:
            del self._batches[key]
        return whole


def soft_overlong(response_tokens: int, max_response_tokens: int, overlong: OverlongConfig) -> float:
    """Return DAPO's soft penalty for responses near their token limit, between -penalty and 0.

        R(n) = 0                                      n <= L - buffer
             = penalty * ((L - buffer) - n) / buffer  up to L
             = -penalty                               beyond

    n is the response length and L its limit, in tokens. The penalty changes the reward, never the accuracy.
    Source: DAPO, arXiv 2503.14476, equation 13 (where penalty is 1).
    """
    over = response_tokens - (max_response_tokens - overlong.buffer_tokens)
    return -overlong.penalty * min(over / overlong.buffer_tokens, 1.0) if over > 0 else 0.0
