"""What each side of an asynchronous run takes for a step, if it never waits for the other.

The trainer: log-probabilities and updates. The engines: the step's responses at constant concurrency, since nobody
waits for the longest of them while others run beside it. Running at a time, in all engines together, are at most

    what their KV caches hold, and rollout.max_concurrent_requests of each
    that less (n - 1) / 2, as a group begins when there is room for all of it
    rollout.max_staleness x B x n x mean / life

with B = trainer.prompts_per_step groups of n = rollout.samples_per_prompt: beside those in training, so many steps'
groups exist. A group lives until its longest response ends, which takes rollout.max_response_tokens as in the rest of
the plan, and each of its requests runs for mean / life of that time. So a step has at least life / max_staleness
passes: one step off never takes less than the longest response.

With rollout.swap=finish all that runs ends before the weights change, and engines take what a synchronous step does.
With recompute they compute the KV cache of all that runs anew, once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rl.config.rules.episodes import concurrent_episodes
from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import FINISH, RECOMPUTE
from mcore_rl.planner.batches import BatchArithmetic
from mcore_rl.planner.engine import EngineRank
from mcore_rl.planner.flops import StepFlops, generation_seconds, room, step_seconds


@dataclass(frozen=True)
class Sides:
    """Both, for any number of engines and of trainer ranks."""

    config: Config
    flops: StepFlops
    batch: BatchArithmetic
    engine: EngineRank

    def train_seconds(self, num_ranks: int) -> float | None:
        """Of log-probabilities and updates; None where plan.peak_tflops is not set."""
        seconds = step_seconds(self.config, self.flops, self.batch, self.engine, num_ranks)
        return None if seconds.logp is None or seconds.update is None else seconds.logp + seconds.update

    def generate_seconds(self, num_engines: int) -> float | None:
        """None where an assumption of `plan.*` is not set."""
        config, batch = self.with_engines(num_engines), self.batch
        if config.rollout.swap == FINISH:
            return step_seconds(config, self.flops, batch, self.engine, world_size=1).generate
        running = self.running_requests(num_engines)
        anew = running * (batch.mean_prompt + batch.mean_response / 2) if config.rollout.swap == RECOMPUTE else 0.0
        passes = batch.responses * batch.mean_response / running
        per_engine = running / num_engines
        return generation_seconds(config, self.flops, batch, self.engine, running=per_engine, passes=passes, anew=anew)

    def running_requests(self, num_engines: int) -> float:
        """That are decoded at a time, on average; of all engines."""
        held = max(int(room(self.config, self.batch, self.engine)), 1)
        decoded = min(self.config.rollout.max_concurrent_requests, held) * num_engines
        ahead = self.config.rollout.max_staleness * self.batch.responses / self.lifetime
        return min(decoded, self._places(num_engines), ahead)

    def groups_under_way(self, num_engines: int) -> float:
        """Of which something runs, or waits in an engine for its turn."""
        rollout, running = self.config.rollout, self.running_requests(num_engines)
        waiting = self._places(num_engines) - running
        groups = (waiting + running * self.lifetime) / rollout.samples_per_prompt
        return min(groups, rollout.max_staleness * self.config.trainer.prompts_per_step)

    def _places(self, num_engines: int) -> float:
        """Requests that engines have under way. A group begins when there is room for all of it."""
        rollout = self.config.rollout
        return concurrent_episodes(rollout) * num_engines - (rollout.samples_per_prompt - 1) / 2

    @property
    def lifetime(self) -> float:
        """Of a group, over that of a response on average."""
        alone = self.config.rollout.samples_per_prompt == 1
        return 1.0 if alone else self.config.rollout.max_response_tokens / self.batch.mean_response

    def with_engines(self, num_engines: int) -> Config:
        return replace(self.config, rollout=replace(self.config.rollout, num_engines=num_engines))
