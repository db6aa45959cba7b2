"""Asynchronous runs with round numbers: 40 responses of 64 + 128 tokens in 8 groups of 5, and two engines of two
ranks."""

from __future__ import annotations

from typing import Any

from mcore_rl.config.models import ActorConfig
from mcore_rl.config.schema import ClusterConfig, Config, PlanConfig, RolloutConfig, TrainerConfig
from mcore_rl.planner.engine import GIB, EngineRank
from mcore_rl.planner.sync import WeightSync
from mcore_rl.planner.times import StepTimes
from mcore_rl.planner.workload import StepFlops, batch_arithmetic
from model_converters.mapping.layout import TrainLayout

LAYOUT = TrainLayout(4)
ENGINE = EngineRank(GIB, 0, GIB, kv_bytes_per_token=2**21, sequences=50.0)
"""Weights of 1 GiB, and 1 GiB of KV cache for four half-finished sequences."""
FLOPS = StepFlops(generate=7680e9, logp=3e12, update=9e12)
"""1e9 FLOP per token."""


def config_of(**rollout: Any) -> Config:
    """Return a configuration with four trainer ranks and engines that decode five requests: 10 - (5 - 1) / 2 = 8
    run."""
    options = {"num_engines": 2, "tp": 2, "samples_per_prompt": 5, "max_concurrent_requests": 5, "max_staleness": 2}
    lengths = {"max_prompt_tokens": 128, "max_response_tokens": 256}
    rates = {"peak_tflops": 1.0, "memory_bandwidth_gib_per_second": 256.0}
    return Config(
        rollout=RolloutConfig(**(options | lengths | rollout)),
        trainer=TrainerConfig(prompts_per_step=8, prompts_per_update=8),
        actor=ActorConfig(num_ranks=4),
        cluster=ClusterConfig(gpus_per_node=8, placement="disaggregated", device="cuda"),
        plan=PlanConfig(mfu_update=0.5, mfu_logp=0.5, mfu_prefill=0.5, **rates),
    )


def sides_of(config: Config, *, flops: StepFlops = FLOPS, engine: EngineRank = ENGINE) -> StepTimes:
    return StepTimes(config, flops, batch_arithmetic(config, LAYOUT), engine)


def sync_of(seconds: float | None, crossing: int = 1) -> WeightSync:
    amounts = {"bytes_per_engine_rank": 0, "floor_bytes_per_engine_rank": 0, "buckets": 1}
    of_hosts = dict.fromkeys(("total_bytes", "bytes_crossing_hosts", "busiest_sender_bytes"), crossing)
    return WeightSync(**amounts, **of_hosts, seconds=seconds, transport="network", slots_bytes=0, max_peers=1)
