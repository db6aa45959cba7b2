"""Waiting times in an asynchronous run, compared with values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.algorithm import AlgorithmConfig, PolicyLossConfig
from mcore_rl.planner.overlap import if_asynchronous, overlap_of
from mcore_rl.planner.report import gain_row, overlap_rows
from mcore_rl.planner.times import StepSeconds
from mcore_rl.planner.workload import StepFlops
from tests.unit.planner.asynchronous import ENGINE, FLOPS, LAYOUT, config_of, sides_of, sync_of

PROMPTS = 1.28
"""Seconds for the prompts: 40 x 64 tokens of 1e9 FLOP on four GPUs of 0.5e12 FLOP per second."""


@pytest.mark.parametrize(
    ("rollout", "running", "seconds"),
    [
        # 40 x 128 / 8 passes. In each, an engine reads 1 GiB of weights and 1 GiB of cache (four requests), at 256
        # GiB/s.
        ({}, 8, PROMPTS + 640 * 2 / 256),
        # Two steps' groups exist in addition to the groups in training. Half of their requests have ended: two passes
        # per token.
        ({"max_concurrent_requests": 100}, 40, PROMPTS + 128 * (1 + 5) / 256),
        # One step off: one pass per token of the longest response.
        ({"max_concurrent_requests": 100, "max_staleness": 1}, 20, PROMPTS + 256 * (1 + 2.5) / 256),
        # A group of one response ends with it.
        ({"samples_per_prompt": 1, "max_concurrent_requests": 100, "max_staleness": 1}, 8, None),
        # 8 x 128 tokens are computed again after each change of weights.
        ({"swap": "recompute"}, 8, PROMPTS + 0.512 + 640 * 2 / 256),
        # All responses end first: 20 per engine, five at a time, with 1.25 GiB of cache.
        ({"swap": "finish"}, 8, PROMPTS + 512 * 2.25 / 256),
    ],
)
def test_engines_alone(rollout: dict[str, Any], running: float, seconds: float | None) -> None:
    sides = sides_of(config_of(**rollout))
    assert sides.running_requests(2) == running
    if seconds is not None:
        assert sides.generate_seconds(2) == pytest.approx(seconds)


def test_a_full_cache_decodes_fewer() -> None:
    # Two sequences of full length need as much cache as four of mean length.
    sides = sides_of(config_of(max_concurrent_requests=100), engine=replace(ENGINE, sequences=2.0))
    assert sides.running_requests(2) == 8
    assert sides.groups_in_flight(2) == 16  # the others wait in the engines: all groups of two steps are submitted


def test_requests_by_rank_fill_the_caches_of_all_ranks() -> None:
    # The same four requests per engine, two on each rank, which reads 0.5 GiB of cache.
    engine = replace(ENGINE, request_ranks=2)
    assert sides_of(config_of(), engine=engine).generate_seconds(2) == pytest.approx(PROMPTS + 640 * 1.5 / 256)
    # Half as many sequences on each of two ranks.
    sides = sides_of(config_of(max_concurrent_requests=100), engine=replace(engine, sequences=1.0))
    assert sides.running_requests(2) == 8


def test_what_engines_take_when_all_ends_is_a_synchronous_step() -> None:
    sides = sides_of(config_of(swap="finish"))
    assert sides.generate_seconds(2) == sides.synchronous(LAYOUT.world_size, 2).generate


def test_the_trainer_waits_for_slow_engines() -> None:
    found = overlap_of(sides_of(config_of()), LAYOUT, sync_of(0.72))
    assert found is not None
    assert (found.generate_seconds, found.train_seconds) == (pytest.approx(6.28), 6.0)
    assert found.step_seconds == pytest.approx(7.0)
    assert found.trainer_idle_fraction == pytest.approx(0.28 / 7)
    assert found.generator_idle_fraction == 0
    assert (found.engine_gpus, found.trainer_gpus) == (4, 4)
    # Eight running requests belong to 8 x 2 / 5 groups, half of whose requests have ended. In 6 of 6.28 s, others
    # have ended.
    assert found.mean_staleness == pytest.approx(3.2 / 8 + 6 / 6.28)
    assert found.max_staleness == 4


@pytest.mark.parametrize(("rollout", "mean"), [({"max_staleness": 1}, 1), ({}, 2), ({"max_staleness": 5}, 5)])
def test_engines_wait_for_a_slow_trainer_and_groups_pile_up(rollout: dict[str, Any], mean: int) -> None:
    flops = StepFlops(FLOPS.generate, logp=3e12, update=17e12)
    found = overlap_of(sides_of(config_of(**rollout), flops=flops), LAYOUT, sync_of(2.5))
    assert found is not None
    assert found.step_seconds == 12.5
    assert (found.trainer_idle_fraction, found.generator_idle_fraction) == (0, pytest.approx(3.72 / 12.5))
    assert found.mean_staleness == mean


def test_more_of_one_side_takes_less_time_of_it_alone() -> None:
    sides = sides_of(config_of(max_concurrent_requests=8))
    generate = [sides.generate_seconds(engines) for engines in range(1, 9)]
    train = [sides.train_seconds(ranks) for ranks in (1, 2, 4, 8)]
    assert generate == sorted(generate, reverse=True)
    assert len(set(generate)) == len(generate)
    assert train == [24, 12, 6, 3]
    further = [config_of(max_concurrent_requests=99, max_staleness=eta) for eta in (1, 2, 4)]
    ahead = [sides_of(config).generate_seconds(2) for config in further]
    assert ahead == sorted(ahead, reverse=True)
    assert len(set(ahead)) == 3


def test_what_is_not_known_is_not_invented() -> None:
    config = config_of()
    config.plan.memory_bandwidth_gib_per_second = None
    found = overlap_of(sides_of(config), LAYOUT, sync_of(None))
    assert found is not None
    assert (found.generate_seconds, found.train_seconds, found.swap_seconds) == (None, 6.0, None)
    assert (found.step_seconds, found.trainer_idle_fraction, found.mean_staleness) == (None, None, None)
    assert found.balanced_overrides is None
    rows = dict(overlap_rows(found))
    assert rows["time per step"] == "set plan.peak_tflops and plan.memory_bandwidth_gib_per_second"
    assert rows["staleness"] == "at most 4 versions"
    within = overlap_of(sides_of(config_of()), LAYOUT, sync_of(None, crossing=0))
    assert within is not None
    assert within.swap_seconds == 0


def test_swap_takes_the_seconds_of_later_syncs() -> None:
    later = sync_of(0.25)
    found = overlap_of(sides_of(config_of()), LAYOUT, replace(sync_of(0.75), later=later))
    assert found is not None
    assert found.swap_seconds == 0.25
    within = overlap_of(sides_of(config_of()), LAYOUT, replace(sync_of(0.75), later=sync_of(None, crossing=0)))
    assert within is not None
    assert within.swap_seconds == 0


def test_the_table() -> None:
    found = overlap_of(sides_of(config_of()), LAYOUT, sync_of(0.72))
    assert found is not None
    rows = dict(overlap_rows(found))
    assert rows["time per step"] == (
        "7.0 s: generate 6.3 s while logp and update take 6.0 s, weight swap 0.7 s; the trainer waits 4% of it"
    )
    assert rows["slots"] == "4 generate, 4 train: no other split is faster"
    assert rows["staleness"] == "1.4 on average, at most 4 versions"
    slow = StepFlops(FLOPS.generate, logp=3e12, update=17e12)
    found = overlap_of(sides_of(config_of(), flops=slow), LAYOUT, sync_of(2.5))
    assert found is not None
    assert dict(overlap_rows(found))["time per step"].endswith("weight swap 2.5 s; engines wait 30% of it")
    unknown = overlap_of(sides_of(config_of()), LAYOUT, sync_of(None))
    assert unknown is not None
    assert "weight swap unknown, set plan.network_gib_per_second" in dict(overlap_rows(unknown))["time per step"]


def test_synchronous_runs_have_no_overlap_and_learn_what_they_would_gain() -> None:
    sides = sides_of(config_of(max_staleness=0))
    assert overlap_of(sides, LAYOUT, sync_of(1.0)) is None
    ahead = if_asynchronous(sides, LAYOUT, sync_of(1.0))
    assert ahead is not None
    assert ahead.step_seconds == pytest.approx(6.28 + 1)
    seconds = StepSeconds(generate=7.0, logp=1.5, update=4.5)
    assert gain_row(ahead, seconds) == [
        ("asynchronous", "rollout.max_staleness=1 takes 7.3 s per step instead of 14.0 s")
    ]
    assert gain_row(ahead, replace(seconds, generate=None)) == []
    sides.config.algorithm.advantage = "remax"  # remax cannot run asynchronously
    assert if_asynchronous(sides, LAYOUT, sync_of(1.0)) is None


def test_who_shares_devices_or_generates_nothing_has_none() -> None:
    together = sides_of(config_of(max_staleness=0))
    together.config.cluster.placement = "colocated"
    assert if_asynchronous(together, LAYOUT, sync_of(1.0)) is None
    assert if_asynchronous(sides_of(config_of()), LAYOUT, sync_of(1.0)) is None
    supervised = sides_of(config_of())
    supervised.config.algorithm = AlgorithmConfig(policy_loss=PolicyLossConfig(name="sft"))
    assert overlap_of(supervised, LAYOUT, sync_of(1.0)) is None
