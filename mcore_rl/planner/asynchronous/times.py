"""Time of one training step in an asynchronous run, for trainer and engines separately.

The trainer computes log-probabilities and updates. The engines generate the responses of a step at constant
concurrency, because other requests run while the longest response is finished. The number of requests that run at the
same time, over all engines, has three upper bounds:

    KV cache capacity, and rollout.max_concurrent_requests of each engine
    the same, minus (n - 1) / 2, because a group starts only if all of it can be queued
    rollout.max_staleness x B x n x mean / life

with B = trainer.prompts_per_step groups of n = rollout.samples_per_prompt, and the mean and the maximum length (life)
of a response. Besides the groups in training,
max_staleness x B groups exist. A group lives until its longest response ends (rollout.max_response_tokens, as in the
rest of the plan), and each of its requests runs for mean / life of that time. So a step takes at least
life / max_staleness engine steps: with max_staleness=1, as long as the longest response.

With rollout.swap=finish all running requests end before the weights change, so the engines need the time of a
synchronous step. With recompute they recompute the KV cache of all running requests once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rl.config.rules.episodes import concurrent_episodes
from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import FINISH, RECOMPUTE
from mcore_rl.planner.batches import BatchArithmetic
from mcore_rl.planner.engine import EngineRank
from mcore_rl.planner.flops import StepFlops, cache_sequences, generation_seconds, step_seconds


@dataclass(frozen=True)
class StepTimes:
    """Time of a step as a function of the number of engines and of trainer ranks."""

    config: Config
    flops: StepFlops
    batch: BatchArithmetic
    engine: EngineRank

    def train_seconds(self, num_ranks: int) -> float | None:
        """Compute the time of log-probabilities and updates; None if plan.peak_tflops is not set."""
        seconds = step_seconds(self.config.plan, self.config.rollout, self.flops, self.batch, self.engine, num_ranks)
        return None if seconds.logp is None or seconds.update is None else seconds.logp + seconds.update

    def generate_seconds(self, num_engines: int) -> float | None:
        """Compute the time in which the engines generate a step's responses.

        None if an assumption in `plan.*` is not set.
        """
        plan, batch = self.config.plan, self.batch
        rollout = replace(self.config.rollout, num_engines=num_engines)
        if rollout.swap == FINISH:
            return step_seconds(plan, rollout, self.flops, batch, self.engine, world_size=1).generate
        running = self.running_requests(num_engines)
        recomputed = running * (batch.mean_prompt + batch.mean_response / 2) if rollout.swap == RECOMPUTE else 0.0
        steps = batch.responses * batch.mean_response / running
        return generation_seconds(
            plan,
            rollout,
            self.flops,
            batch,
            self.engine,
            running=running / num_engines,
            steps=steps,
            recomputed=recomputed,
        )

    def running_requests(self, num_engines: int) -> float:
        """Return the mean number of requests that are decoded at a time, over all engines."""
        cached = max(int(cache_sequences(self.config.rollout, self.batch, self.engine)), 1)
        decoded = min(self.config.rollout.max_concurrent_requests, cached) * num_engines
        ahead = self.config.rollout.max_staleness * self.batch.responses / self.lifetime
        return min(decoded, self._queued(num_engines), ahead)

    def groups_in_flight(self, num_engines: int) -> float:
        """Return the mean number of groups with a request that runs or is queued in an engine."""
        rollout, running = self.config.rollout, self.running_requests(num_engines)
        waiting = self._queued(num_engines) - running
        groups = (waiting + running * self.lifetime) / rollout.samples_per_prompt
        return min(groups, rollout.max_staleness * self.config.trainer.prompts_per_step)

    def _queued(self, num_engines: int) -> float:
        """Return the mean number of requests in the engines. A group starts only if all of it can be queued."""
        rollout = self.config.rollout
        return concurrent_episodes(rollout) * num_engines - (rollout.samples_per_prompt - 1) / 2

    @property
    def lifetime(self) -> float:
        """Lifetime of a group divided by the mean lifetime of a response."""
        alone = self.config.rollout.samples_per_prompt == 1
        return 1.0 if alone else self.config.rollout.max_response_tokens / self.batch.mean_response
