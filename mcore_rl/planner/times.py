"""Time of a training step at the rates assumed in `plan.*`, as a function of the numbers of engines and trainer ranks.

Training phases, teachers on Megatron ranks, critic and reward model: FLOP / (ranks x plan.peak_tflops x plan.mfu_*),
where the assumed mfu includes pipeline bubbles and communication. Prefill, and teachers on engines: the same with
plan.mfu_prefill on the engines' ranks. Decoding is bound by memory bandwidth: every engine step reads the weights (a
large batch uses all experts) and the KV cache of the running sequences at plan.memory_bandwidth_gib_per_second. A
synchronous run has response tokens / running sequences steps, and at least as many as the longest response has tokens.

In an asynchronous run, the engines generate the responses of a step at constant concurrency, because other requests run
while the longest response is finished. The number of requests that run at the same time, over all engines, has three
upper bounds:

    KV cache capacity, and rollout.max_concurrent_requests of each engine
    the same, minus (n - 1) / 2, because a group starts only if all of it can be queued
    rollout.max_staleness x B x n x mean / life

with B = trainer.prompts_per_step groups of n = rollout.samples_per_prompt, and the mean and the maximum length (life)
of a response. Besides the groups in training, max_staleness x B groups exist. A group lives until its longest response
ends (rollout.max_response_tokens, as in the rest of the plan), and each of its requests runs for mean / life of that
time. So a step takes at least life / max_staleness engine steps: with max_staleness=1, as long as the longest response.

With rollout.swap=finish all running requests end before the weights change, so the engines need the time of a
synchronous step. With recompute they recompute the KV cache of all running requests once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mcore_rl.config.rules.rollout import concurrent_episodes
from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import FINISH, RECOMPUTE
from mcore_rl.planner.engine import GIB, EngineRank, longest_sequence
from mcore_rl.planner.workload import BatchArithmetic, StepFlops


@dataclass(frozen=True)
class StepSeconds:
    """Time of each phase of a step. None if an assumption in `plan.*` is not set."""

    generate: float | None
    logp: float | None
    update: float | None
    teacher: float | None = 0.0
    critic: float | None = 0.0
    reward_model: float | None = 0.0


@dataclass(frozen=True)
class StepTimes:
    """Time of a step for any number of engines and of trainer ranks."""

    config: Config
    flops: StepFlops
    batch: BatchArithmetic
    engine: EngineRank

    def synchronous(self, num_ranks: int, num_engines: int) -> StepSeconds:
        """Compute the time of each phase of a step in which the phases follow each other."""
        plan, rollout, batch = self.config.plan, self.config.rollout, self.batch
        sequences = ceil(batch.responses / num_engines)
        # At least 1: a cache without room for one sequence is an error of the plan (verdict.py).
        running = max(min(sequences, rollout.max_concurrent_requests, int(self._cache_sequences)), 1)
        # However few sequences run, the longest response takes one step per token.
        steps = max(sequences * batch.mean_response / running, rollout.max_response_tokens)
        rate = None if plan.peak_tflops is None else num_ranks * plan.peak_tflops * 1e12
        return StepSeconds(
            # Without FLOP there are no engines: the run trains on texts of the data set.
            generate=self._generation(num_engines, running, steps) if self.flops.generate else 0.0,
            logp=None if rate is None else self.flops.logp / (rate * plan.mfu_logp),
            update=None if rate is None else self.flops.update / (rate * plan.mfu_update),
            teacher=self._teacher(num_ranks),
            critic=self._critic(num_ranks),
            reward_model=self._reward_model(num_ranks),
        )

    def _teacher(self, num_ranks: int) -> float | None:
        """Compute the time of the teachers' pass, on ranks or on engines; 0 without one in this job."""
        plan, teacher = self.config.plan, self.config.teacher
        if not self.flops.teacher:
            return 0.0
        if plan.peak_tflops is None:
            return None
        # All engines of all teachers work at the same time.
        engines = len(teacher.entries) * teacher.num_engines * teacher.tp
        # Teachers on ranks take turns.
        rate = engines * plan.mfu_prefill if engines else (teacher.num_ranks or num_ranks) * plan.mfu_logp
        return self.flops.teacher / (rate * plan.peak_tflops * 1e12)

    def _critic(self, num_ranks: int) -> float | None:
        """Compute the time of the critic's passes, during which the policy waits; 0 without a critic."""
        plan, flops = self.config.plan, self.flops
        if not flops.critic:
            return 0.0
        if plan.peak_tflops is None:
            return None
        rate = (self.config.critic.num_ranks or num_ranks) * plan.peak_tflops * 1e12
        return flops.values / (rate * plan.mfu_logp) + flops.value_update / (rate * plan.mfu_update)

    def _reward_model(self, num_ranks: int) -> float | None:
        """Compute the time of the reward model's pass on GPUs of the trainer; 0 without one."""
        plan = self.config.plan
        if not self.flops.reward_model:
            return 0.0
        if plan.peak_tflops is None:
            return None
        rate = (self.config.reward_model.num_ranks or num_ranks) * plan.peak_tflops * 1e12
        return self.flops.reward_model / (rate * plan.mfu_logp)

    def train_seconds(self, num_ranks: int) -> float | None:
        """Compute the time of all phases on the trainer's GPUs, and of teachers on engines; None if plan.peak_tflops
        is not set."""
        seconds = self.synchronous(num_ranks, self.config.rollout.num_engines)
        total = 0.0
        for phase in (seconds.logp, seconds.teacher, seconds.critic, seconds.reward_model, seconds.update):
            if phase is None:
                return None
            total += phase
        return total

    def generate_seconds(self, num_engines: int) -> float | None:
        """Compute the time in which the engines of an asynchronous run generate a step's responses.

        None if an assumption in `plan.*` is not set.
        """
        batch, swap = self.batch, self.config.rollout.swap
        if swap == FINISH:
            # The number of trainer ranks does not affect generation.
            return self.synchronous(1, num_engines).generate
        running = self.running_requests(num_engines)
        recomputed = running * (batch.mean_prompt + batch.mean_response / 2) if swap == RECOMPUTE else 0.0
        steps = batch.responses * batch.mean_response / running
        return self._generation(num_engines, running / num_engines, steps, recomputed)

    def _generation(self, num_engines: int, running: float, steps: float, recomputed: float = 0.0) -> float | None:
        """Compute the time of prefill and of `steps` engine steps with `running` requests per engine on average.

        `recomputed` counts tokens, over all engines, whose KV cache is computed again.
        """
        plan, batch, engine = self.config.plan, self.batch, self.engine
        if plan.peak_tflops is None or plan.memory_bandwidth_gib_per_second is None:
            return None
        prompts = self.flops.generate / batch.tokens * (batch.responses * batch.mean_prompt + recomputed)
        prefill = prompts / (num_engines * self.config.rollout.tp * plan.peak_tflops * 1e12 * plan.mfu_prefill)
        # On average, half of a response is in the cache, which a rank reads of its own requests.
        per_rank = running / engine.request_ranks
        cache = per_rank * (batch.mean_prompt + batch.mean_response / 2) * engine.kv_bytes_per_token
        return prefill + steps * (engine.weights_bytes + cache) / (plan.memory_bandwidth_gib_per_second * GIB)

    def running_requests(self, num_engines: int) -> float:
        """Return the mean number of requests that are decoded at a time, over all engines."""
        decoded = min(self.config.rollout.max_concurrent_requests, max(int(self._cache_sequences), 1)) * num_engines
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
    def _cache_sequences(self) -> float:
        """Number of mean-length sequences that an engine's KV cache holds."""
        return self.engine.engine_sequences * longest_sequence(self.config.rollout) / self.batch.mean_tokens

    @property
    def lifetime(self) -> float:
        """Lifetime of a group divided by the mean lifetime of a response."""
        alone = self.config.rollout.samples_per_prompt == 1
        return 1.0 if alone else self.config.rollout.max_response_tokens / self.batch.mean_response
