"""Host memory of the fullest node, calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.config.schema import Config
from mcore_rl.planner.engine import GIB, EngineRank
from mcore_rl.planner.host_memory import HostMemory, fullest_node
from mcore_rl.planner.phases import Phases
from mcore_rl.planner.sync import copies_bytes
from mcore_rl.weights.slices.senders import RankLocations
from mcore_rl.weights.slices.totals import Totals
from tests.unit.planner.asynchronous import sync_of

ENGINE = EngineRank(1000, 200, 4000, 1, 10.0, kept_bytes=1100, routing_bytes=30)
SYNC = replace(sync_of(None, 0), slots_bytes=7)
PHASES = [Phases({}, host_bytes=10 * rank, checkpoint_bytes=3) for rank in range(4)]
STORE = GIB // 2


def cluster_of(placement: str, *, nodes: int = 2, num_engines: int = 2, tp: int = 2) -> Config:
    config = Config()
    config.cluster.nodes, config.cluster.gpus_per_node, config.cluster.placement = nodes, 2, placement
    config.rollout.num_engines, config.rollout.tp = num_engines, tp
    return config


def test_host_memory_of_colocated_run_has_the_weights_of_sleeping_engines() -> None:
    found = fullest_node(cluster_of("colocated"), PHASES, ENGINE, SYNC, cuda=True)
    # Ranks 2 and 3, and both ranks of the second engine.
    assert found == HostMemory(20 + 30, 2 * 1100, 0, 2 * 30, 7, STORE)
    assert found.total == 50 + 2200 + 60 + 7 + STORE
    assert found.describe() == (
        "offloaded state 0.0, kept weights 0.0, routed experts 0.0, weight buckets 0.0, object store 0.5"
    )


def test_host_memory_of_engine_over_two_nodes_counts_its_ranks_on_each() -> None:
    found = fullest_node(cluster_of("colocated", num_engines=1, tp=4), PHASES, ENGINE, SYNC, cuda=True)
    assert (found.offloaded_state, found.kept_weights) == (50, 2200)


def test_host_memory_of_engine_on_one_of_two_nodes_is_counted_there() -> None:
    found = fullest_node(cluster_of("colocated", num_engines=1), PHASES, ENGINE, SYNC, cuda=True)
    # The first node has less trainer state, but the engine.
    assert (found.offloaded_state, found.kept_weights) == (0 + 10, 2200)


def test_host_memory_of_engines_with_own_gpus_has_no_kept_weights() -> None:
    found = fullest_node(cluster_of("disaggregated", nodes=4), PHASES, ENGINE, SYNC, cuda=True)
    assert found == HostMemory(0, 0, 0, 2 * 30, 7, STORE)  # they never sleep


def test_host_memory_has_a_checkpoint_only_if_it_is_written_in_background() -> None:
    config = cluster_of("colocated")
    config.checkpoint.async_save = True
    assert fullest_node(config, PHASES, ENGINE, SYNC, cuda=True).checkpoint == 2 * 3


def test_host_memory_has_copies_of_weights_that_cross_hosts() -> None:
    sync = replace(SYNC, copies_bytes=500)
    assert fullest_node(cluster_of("colocated"), PHASES, ENGINE, sync, cuda=True).weight_copies == 500


def test_copies_bytes_adds_what_a_host_sends_and_receives() -> None:
    locations = RankLocations.of([(0, -1), (1, -1), (1, -1)], [(1, -1), (2, -1)])
    sent, received, none = np.array([70, 10, 20]), np.array([30, 65]), np.zeros(3, np.int64)
    totals = Totals(received, received, sent, sent, none, none, 1)
    assert copies_bytes(totals, locations) == 70  # of hosts with 70, 10 + 20 + 30 and 65
    assert copies_bytes(replace(totals, sent_across=sent + 15), locations) == 90  # of 85, 90 and 65


def test_host_memory_of_supervised_run_has_no_engines() -> None:
    config = cluster_of("colocated")
    config.algorithm.policy_loss.name = "sft"
    found = fullest_node(config, PHASES, ENGINE, SYNC, cuda=True)
    assert found == HostMemory(50, 0, 0, 0, 0, STORE)


@pytest.mark.parametrize("key", [None, 3.0])
def test_host_memory_contains_the_object_store(key: float | None) -> None:
    config = cluster_of("colocated")
    if key is not None:
        config.cluster = replace(config.cluster, object_store_gib=key)
    found = fullest_node(config, PHASES, ENGINE, SYNC, cuda=True)
    assert found.object_store == (STORE if key is None else 3 * GIB)
