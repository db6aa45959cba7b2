"""Division of GPUs between engines and trainer, compared with the placement of runs and with values computed by
hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.planner.engine import EngineRank
from mcore_rl.planner.overlap import GpuSplit, balanced, overlap_of, room_for_engines, splits
from mcore_rl.planner.times import StepTimes
from mcore_rl.planner.workload import StepFlops
from mcore_rl.resolved.placement import place
from model_converters.mapping.layout import TrainLayout
from tests.unit.planner.asynchronous import config_of, sides_of, sync_of


def cluster_of(nodes: int, slots: int, *, tp: int, num_ranks: int | None = None, own_nodes: int = 0) -> Config:
    config = config_of(tp=tp, nodes=own_nodes)
    config.cluster.nodes, config.cluster.gpus_per_node, config.actor.num_ranks = nodes, slots, num_ranks
    return config


def can_be_placed(config: Config, num_engines: int) -> bool:
    try:
        place(config.cluster, config.rollout, config.num_trainer_ranks, on_gpus=True, num_engines=num_engines)
    except ConfigError:
        return False
    return True


def splits_of(config: Config, layout: TrainLayout) -> list[GpuSplit]:
    responses = config.trainer.prompts_per_update * config.rollout.samples_per_prompt
    return list(splits(config.cluster, config.rollout, responses, layout))


def overrides_of(split: GpuSplit, config: Config) -> list[str]:
    return split.overrides(config.cluster, config.rollout, config.actor.num_ranks)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_as_many_engines_as_a_run_places(tp: int) -> None:
    for slots, nodes, own_nodes, num_ranks in product((4, 5), (1, 2, 4), (0, 1, 2), range(1, 17)):
        if own_nodes >= nodes or num_ranks > (nodes - own_nodes) * slots or (tp > slots and (nodes == 1 or tp % slots)):
            continue
        config = cluster_of(nodes, slots, tp=tp, num_ranks=num_ranks, own_nodes=own_nodes)
        room = room_for_engines(config.cluster, config.rollout.tp, num_ranks, own_nodes)
        assert room == 0 or can_be_placed(config, room), (slots, nodes, own_nodes, num_ranks)
        assert not can_be_placed(config, room + 1), (slots, nodes, own_nodes, num_ranks)


def test_slots_that_ranks_leave() -> None:
    config, layout = cluster_of(1, 8, tp=2, num_ranks=4), TrainLayout(4, ep=2)
    assert splits_of(config, layout) == [GpuSplit(2, 3), GpuSplit(4, 2), GpuSplit(6, 1)]


def test_whole_nodes_and_what_the_layout_divides() -> None:
    config, layout = cluster_of(5, 8, tp=4, own_nodes=1), TrainLayout(24, tp=4, pp=3)
    # 24 ranks of 32 slots and 12 of 16 are used; with two nodes, all slots have ranks.
    assert splits_of(config, layout) == [GpuSplit(24, 2, 1), GpuSplit(24, 4, 2), GpuSplit(12, 6, 3)]
    assert overrides_of(GpuSplit(24, 4, 2), config) == ["rollout.nodes=2", "rollout.num_engines=4"]
    assert overrides_of(GpuSplit(12, 6, 3), config) == [
        "rollout.nodes=3",
        "rollout.num_engines=6",
        "actor.num_ranks=12",
    ]
    config.actor.num_ranks = 12
    assert overrides_of(GpuSplit(12, 2, 1), config) == []
    assert overrides_of(GpuSplit(24, 2, 1), config) == ["actor.num_ranks=24"]
    assert "actor.num_ranks=24" in overrides_of(GpuSplit(24, 4, 2), config)  # all slots, of which 12 were used before


def test_experts_divide_the_ranks_as_well_and_every_rank_has_a_response() -> None:
    config = cluster_of(1, 16, tp=1, num_ranks=6)
    assert [split.num_ranks for split in splits_of(config, TrainLayout(6, tp=2, ep=3, etp=1))] == [6, 12]
    config.trainer.prompts_per_update, config.rollout.samples_per_prompt = 1, 2
    assert [split.num_ranks for split in splits_of(config, TrainLayout(2, tp=2))] == [2, 4]


def work(config: Config, *, generate: float, train: float) -> StepTimes:
    """Return StepTimes of the given seconds on one GPU for any number of running requests: prompts and updates, no
    decoding."""
    batch = sides_of(config).batch
    prompts = generate * 0.5e12 * batch.mean_tokens / batch.mean_prompt
    return replace(
        sides_of(config, flops=StepFlops(prompts, 0.0, train * 0.5e12)), engine=EngineRank(0, 0, 1, 0, 1000.0)
    )


@pytest.mark.parametrize("own_nodes", [1, 2, 4])
def test_both_sides_take_as_long(own_nodes: int) -> None:
    config = cluster_of(8, 8, tp=8, own_nodes=own_nodes)
    config.rollout.num_engines = own_nodes
    sides, layout = work(config, generate=160, train=480), TrainLayout(config.num_trainer_ranks, tp=2)
    assert balanced(sides, layout) == GpuSplit(48, 2, 2)
    found = overlap_of(sides, layout, sync_of(1.0))
    assert found is not None
    assert (found.balanced_engine_gpus, found.balanced_trainer_gpus) == (16, 48)
    assert found.balanced_step_seconds == pytest.approx(10 + 1)
    assert found.generate_seconds == pytest.approx(160 / (8 * own_nodes))
    expected = [] if own_nodes == 2 else ["rollout.nodes=2", "rollout.num_engines=2"]
    assert found.balanced_overrides == expected


def test_a_split_that_no_other_beats_stays() -> None:
    config = cluster_of(1, 4, tp=1, num_ranks=2)
    assert balanced(work(config, generate=10, train=10), TrainLayout(2)) == GpuSplit(2, 2)
    # On CPU, engines need no slots, so there can be more ranks and engines than slots.
    config.rollout.num_engines, config.actor.num_ranks = 4, 4
    assert balanced(work(config, generate=10, train=10), TrainLayout(4)) == GpuSplit(4, 4)
