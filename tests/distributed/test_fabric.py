"""Fabric test with ranks that are slow, fail, die or hang: the report names them, and no process remains."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed as dist

from mcore_rl import cli
from mcore_rl.doctor.fabric.bench import Bench
from mcore_rl.doctor.fabric.rendezvous import Address, open_place
from mcore_rl.doctor.fabric.report import FabricReport
from mcore_rl.doctor.fabric.supervisor import RankMain, run_rank, supervise
from mcore_rl.runtime.addresses import free_port
from tests.distributed import converting
from tests.distributed.launch import fork_children

ROOT = Path(__file__).parents[2]
BETWEEN = "all-reduce between two nodes"
# 10 %: the injected faults slow a measurement down by a factor of about 100, other processes by far less.
LIMITS = (60, 10)
"""Timeout of a stage in seconds, and percentage of the median below which a value is slow."""


def slow_product(rank: int, *others: Any) -> None:
    if rank == 1:
        product = torch.matmul

        def slow_matmul(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            time.sleep(0.5)
            return product(*args, **kwargs)

        torch.matmul = slow_matmul  # type: ignore[assignment]
    run_rank(rank, *others)


def slow_links(rank: int, *others: Any) -> None:
    reduce = dist.all_reduce

    def slow_reduce(values: torch.Tensor) -> None:
        time.sleep(0.3 if dist.get_world_size() == 2 else 0)
        reduce(values)

    if rank == 1:
        dist.all_reduce = slow_reduce
    run_rank(rank, *others)


def fail_at_copy(rank: int, *others: Any) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("uncorrectable ECC error\nand a stack")

    if rank == 0:
        Bench._copy = fail  # type: ignore[assignment, method-assign]
    run_rank(rank, *others)


def die_in_collective(rank: int, *others: Any) -> None:
    if rank == 1:
        dist.all_reduce = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    run_rank(rank, *others)


def hang_at_product(rank: int, *others: Any) -> None:
    if rank == 1:
        torch.matmul = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]
    run_rank(rank, *others)


def run(num_nodes: int, slots: int, rank_main: RankMain, *limits: float) -> list[FabricReport]:
    """Return the reports of simulated nodes, whose supervisors are threads of one process."""
    return converting.alone(_run, num_nodes, slots, rank_main, limits)  # type: ignore[no-any-return]


def _run(num_nodes: int, slots: int, rank_main: RankMain, limits: tuple[float, ...]) -> list[FabricReport]:
    """Run the nodes in this process."""
    fork_children()
    first = open_place(0, num_nodes, "n0", Address("127.0.0.1", 0))
    places = [first, *(open_place(node, num_nodes, f"n{node}", first.address) for node in range(1, num_nodes))]
    with ThreadPoolExecutor(num_nodes) as pool:
        reports = list(pool.map(lambda place: supervise(place, slots, *(limits or LIMITS), rank_main), places))
    assert multiprocessing.active_children() == []
    return reports


def stages_of(report: FabricReport) -> set[str]:
    return {figure.stage for figure in report.figures}


@pytest.mark.on_demand
def test_slow_rank_is_named() -> None:
    (report,) = run(1, 3, slow_product)
    (problem,) = [problem for problem in report.problems if problem.stage == "matrix product"]
    assert (problem.kind, problem.subject, problem.ranks) == ("slow", "rank 1 (n0, slot 1)", (1,))
    assert problem.value is not None
    assert problem.median_of_others is not None
    assert problem.value < problem.median_of_others / 10
    assert "all-reduce in a node" in stages_of(report)  # the test continues


def test_slow_node_is_named_on_all_nodes() -> None:
    reports = run(3, 1, slow_links)
    assert reports[0] == reports[1] == reports[2]
    between = [problem for problem in reports[0].problems if problem.stage == BETWEEN]
    assert [problem.subject for problem in between] == ["n0 - n1, slot 0", "n1 - n2, slot 0", "n1"]
    assert "n1" in reports[0].blamed()
    assert "all-reduce of all nodes" in stages_of(reports[0])


@pytest.mark.parametrize(
    ("rank_main", "problem"),
    [
        (fail_at_copy, "copy on the device: rank 0 (n0, slot 0): RuntimeError: uncorrectable ECC error"),
        (die_in_collective, "all-reduce in a node: rank 1 (n0, slot 1): its process died of SIGKILL"),
    ],
)
def test_failed_or_dead_rank_is_named_and_ends_the_test(rank_main: RankMain, problem: str) -> None:
    (report,) = run(1, 2, rank_main)
    assert [str(p) for p in report.problems if p.kind == "failing"] == [f"failing: {problem}"]
    assert list(report.blamed()) == ["n0"]


def test_hanging_rank_is_named_after_the_timeout_and_killed() -> None:
    (report,) = run(1, 2, hang_at_product, 15, 0)
    (problem,) = report.problems
    assert str(problem) == "failing: matrix product: rank 1 (n0, slot 1): no answer within 15 s"
    assert stages_of(report) == {"matrix product"}


def test_absent_node_is_named() -> None:
    place = open_place(0, 2, "n0", Address("127.0.0.1", 0), ("n0", "n1"))
    report = supervise(place, 1, 1, 80)
    assert [str(problem) for problem in report.problems] == ["failing: meeting: n1: did not join within 3 s"]


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mcore_rl.cli", "doctor", "--node", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_commands_form_two_nodes_and_the_first_reports() -> None:
    meeting = ["--rendezvous", f"127.0.0.1:{free_port()}", "--nodes", "2", "--slots", "1", "--slow-percent", "0"]
    nodes = [start(*meeting, "--node-rank", str(node), "--json") for node in range(2)]
    (first, errors), (second, more_errors) = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors + more_errors
    assert second == ""
    report = json.loads(first)
    assert report["ok"]
    assert len(report["nodes"]) == len(set(report["nodes"])) == 2
    ranks = [figure["ranks"] for figure in report["figures"] if figure["stage"].startswith("all-reduce")]
    assert ranks == [[0, 1], [0, 1]]  # between two nodes, and of all nodes


def test_ranks_end_with_a_killed_supervisor() -> None:
    node = start("--slots", "1")
    supervisor = psutil.Process(node.pid)
    try:
        # The resource tracker of multiprocessing is a child too.
        while not (ranks := [p for p in supervisor.children() if "spawn_main" in " ".join(p.cmdline())]):
            assert node.poll() is None, node.communicate()
            time.sleep(0.05)
    finally:
        node.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    node.communicate()


def test_node_without_node_0_reports_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = ["--rendezvous", address, "--nodes", "2", "--node-rank", "1", "--timeout", "1"]
    assert cli.main(["doctor", "--node", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"error: node 0 of the fabric test does not answer at {address}" in printed.err
