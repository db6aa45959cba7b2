"""Rows of the table of processes."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from mcore_rl.config.schema import Config
from mcore_rl.debugging import process_table as shown
from mcore_rl.resolved.placement import Guests
from mcore_rl.resolved.process_plan import plan_processes

CRITIC = {"critic rank": Guests("critic", 2)}


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    made = Config()
    made.cluster.device, made.cluster.gpus_per_node = "cuda", 4
    made.cluster.nodes, made.cluster.address = 2, "head:6379"
    made.rollout.tp, made.rollout.num_engines = 2, 4
    return made


def rows(config: Config) -> Sequence[shown.Row]:
    return list(shown.process_rows(plan_processes(config, CRITIC, with_engines=True), config))


def test_process_rows_neighbours_with_equal_cells_share_a_row(config: Config) -> None:
    config.rollout.tools, config.rollout.tool_processes = "mine.py:tools", 5
    children = "1 grading, 5 tool"
    assert rows(config) == [
        ("trainer ranks 0-3", "0", "1 GPU", "1", "3", ""),
        ("trainer ranks 4-7", "1", "1 GPU", "1", "3", ""),
        ("rollout engine 0", "0", "GPUs of ranks 0-1", "2", "3", children),
        ("rollout engine 1", "0", "GPUs of ranks 2-3", "2", "3", children),
        ("rollout engine 2", "1", "GPUs of ranks 4-5", "2", "3", children),
        ("rollout engine 3", "1", "GPUs of ranks 6-7", "2", "3", children),
        ("critic rank 0", "0", "GPU of rank 0", "1", "3", ""),
        ("critic rank 1", "0", "GPU of rank 1", "1", "3", ""),
    ]


def test_process_rows_grading_runs_on_the_engines_first_node(config: Config) -> None:
    config.rollout.tp, config.rollout.num_engines, config.reward.workers = 8, 1, 6
    leader, follower = rows(config)[2:4]
    assert (leader[0], leader[5]) == ("rollout engine 0", "6 grading")
    assert (follower[0], follower[5]) == ("rollout engine 0, host 2 of 2", "")


def test_process_rows_large_models_on_cpu_share_cores(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.cluster.device = "cpu"
    monkeypatch.setattr(shown, "shares_cores", lambda config: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)))
    # Four ranks of this node share 12 cores. The number of cores of the other node is not known here.
    assert [row[4] for row in rows(config)[:2]] == ["3", "cores / 4"]
    assert rows(config)[0][2] == "none"


def test_process_table_prints_every_cell(config: Config) -> None:
    plan, file = plan_processes(config, {}, with_engines=False), io.StringIO()
    Console(file=file, width=100).print(shown.process_table(plan, config))
    text = file.getvalue()
    assert all(word in text for word in ("driver", "trainer ranks 0-3", "trainer ranks 4-7", "1 GPU"))


@pytest.mark.parametrize(
    ("nodes", "others"),
    [
        (1, ""),
        (2, "; node 1 is another one of the Ray cluster at head:6379"),
        (4, "; nodes 1 to 3 are others, in order of name, of the Ray cluster at head:6379"),
    ],
)
def test_node_line_names_the_host_and_the_cluster(config: Config, nodes: int, others: str) -> None:
    config.cluster.nodes = nodes
    assert shown.node_line(config, "here") == f"node 0 is this host (here){others}"
