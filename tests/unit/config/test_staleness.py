"""Keys of asynchronous training: valid combinations, and features that are rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.config.algorithm import AlgorithmConfig, PolicyLossConfig
from mcore_rl.config.models import ActorConfig, MoeConfig
from mcore_rl.config.rules.rollout import check_staleness
from mcore_rl.config.schema import CheckpointConfig, ClusterConfig, Config, RolloutConfig
from mcore_rl.errors import ConfigError

APART = ClusterConfig(placement="disaggregated")


def config_of(rollout: dict[str, Any], **sections: Any) -> Config:
    return Config(**{"rollout": RolloutConfig(**rollout), "cluster": APART, **sections})


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ({"max_staleness": 1}, 3),
        ({"max_staleness": 4, "max_staleness_hard": 4}, 4),
        ({"max_staleness": 2, "max_staleness_hard": 7, "swap": "recompute", "partial_tokens": 1}, 7),
    ],
)
def test_hard_staleness_null_adds_the_default_slack(given: dict[str, Any], bound: int) -> None:
    config = config_of(given)
    check_staleness(config)
    assert config.rollout.hard_staleness == bound


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of({"swap": "finish"}), r"^rollout\.swap=finish has no effect; set rollout\.max_staleness above 0"),
        (config_of({"max_staleness_hard": 3}), r"^rollout\.max_staleness_hard=3 has no effect"),
        (config_of({"partial_tokens": 64}), r"^rollout\.partial_tokens=64 has no effect; set rollout\.max_staleness"),
        (
            config_of({"max_staleness": 1, "swap": "finish", "partial_tokens": 64}),
            r"^rollout\.partial_tokens=64 pauses .*rollout\.swap=finish .*; set rollout\.swap=keep or recompute",
        ),
        (config_of({"replay_schedule": "runs/a"}), r"^rollout\.replay_schedule=runs/a has no effect"),
        (
            config_of({"max_staleness": 1, "replay_schedule": "runs/a"}),
            r"^rollout\.replay_schedule=runs/a supports .*rollout\.swap is keep.*; set rollout\.swap=recompute",
        ),
        (
            config_of({"max_staleness": 1, "swap": "recompute", "replay_schedule": "runs/a", "episode": "a.py:b"}),
            r"^rollout\.replay_schedule=runs/a supports .*rollout\.episode is a\.py:b; set .*single turns",
        ),
        (
            config_of(
                {"max_staleness": 1, "swap": "recompute", "replay_schedule": "runs/a"},
                checkpoint=CheckpointConfig(drain=True),
            ),
            r"^checkpoint\.drain=true .*rollout\.replay_schedule=runs/a .*; set checkpoint\.drain=false",
        ),
        (config_of({"max_staleness": 3, "max_staleness_hard": 2}), r"^rollout\.\S+_hard=2 is below rollout\.\S+=3"),
        (
            config_of({"max_staleness": 1}, cluster=ClusterConfig()),
            r"^rollout\.max_staleness=1 generates while .*; set cluster\.placement=disaggregated",
        ),
        (
            config_of({"max_staleness": 1, "samples_per_prompt": 9, "max_concurrent_requests": 8, "num_engines": 2}),
            r"^rollout\.samples_per_prompt=9 exceeds the 8 concurrent requests of an engine",
        ),
        (
            config_of({"max_staleness": 1}, algorithm=AlgorithmConfig(advantage="remax")),
            r"^rollout\.max_staleness=1: algorithm\.advantage=remax needs a greedy baseline",
        ),
        (
            config_of({"max_staleness": 1}, actor=ActorConfig(moe=MoeConfig(router_replay="engine"))),
            r"rollout\.swap=keep .* actor\.moe\.router_replay=engine replays .*set rollout\.swap=finish",
        ),
    ],
)
def test_check_staleness_contradictions_name_the_remedy(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_staleness(config)


def test_check_staleness_router_replay_needs_swap_finish() -> None:
    moe = ActorConfig(moe=MoeConfig(router_replay="engine"))
    check_staleness(config_of({"max_staleness": 1, "swap": "finish"}, actor=moe))


def test_check_staleness_supervised_run_passes() -> None:
    sft = AlgorithmConfig(policy_loss=PolicyLossConfig(name="sft"))
    check_staleness(config_of({"max_staleness": 3}, cluster=ClusterConfig(), algorithm=sft))
