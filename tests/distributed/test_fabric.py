"""The fabric test on processes that are slowed, fail, die or hang: each is named, and none is left behind."""

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

import psutil
import pytest

from mcore_rl.doctor.fabric.board import Address, listen
from mcore_rl.doctor.fabric.rank import Hinder, unhindered
from mcore_rl.doctor.fabric.report import Report
from mcore_rl.doctor.fabric.supervisor import Limits, Place, supervise
from mcore_rl.runtime.addresses import free_port

ROOT = Path(__file__).parents[2]
BETWEEN = "all-reduce between two nodes"
# A tenth: what the hinders take is a hundred times what is measured, and other processes of the machine take less.
LIMITS = Limits(timeout_seconds=60, slow_percent=10)


def slow_product(rank: int, stage: str) -> None:
    if (rank, stage) == (1, "matrix product"):
        time.sleep(0.5)


def slow_links(rank: int, stage: str) -> None:
    if (rank, stage) == (1, BETWEEN):
        time.sleep(1)


def fail_at_copy(rank: int, stage: str) -> None:
    if (rank, stage) == (0, "copy on the device"):
        raise RuntimeError("uncorrectable ECC error\nand a stack")


def die_in_collective(rank: int, stage: str) -> None:
    if (rank, stage) == (1, "all-reduce in a node"):
        os.kill(os.getpid(), signal.SIGKILL)


def hang_at_product(rank: int, stage: str) -> None:
    if (rank, stage) == (1, "matrix product"):
        os.kill(os.getpid(), signal.SIGSTOP)


def run(num_nodes: int, slots: int, hinder: Hinder, limits: Limits = LIMITS) -> list[Report]:
    """The reports of pretended nodes, whose supervisors are threads of this process."""
    listener = listen(Address("127.0.0.1", 0))
    address = Address("127.0.0.1", listener.getsockname()[1])
    places = [Place(node, num_nodes, f"n{node}", address, listener if node == 0 else None) for node in range(num_nodes)]
    with ThreadPoolExecutor(num_nodes) as pool:
        reports = list(pool.map(lambda place: supervise(place, slots, limits, hinder), places))
    assert multiprocessing.active_children() == []
    return reports


def stages_of(report: Report) -> set[str]:
    return {figure.stage for figure in report.figures}


@pytest.mark.on_demand  # so are slow nodes
def test_a_slow_rank_is_named() -> None:
    (report,) = run(1, 3, slow_product)
    (problem,) = [problem for problem in report.problems if problem.stage == "matrix product"]
    assert (problem.kind, problem.subject, problem.ranks) == ("slow", "rank 1 (n0, slot 1)", (1,))
    assert problem.value is not None
    assert problem.median_of_others is not None
    assert problem.value < problem.median_of_others / 10
    assert "all-reduce in a node" in stages_of(report)  # to the end, all the same


def test_a_slow_node_is_named_by_both_of_its_pairs_and_all_nodes_have_one_report() -> None:
    reports = run(3, 1, slow_links)
    assert reports[0] == reports[1] == reports[2]
    between = [problem for problem in reports[0].problems if problem.stage == BETWEEN]
    assert [problem.subject for problem in between] == ["n0 - n1, slot 0", "n1 - n2, slot 0", "n1"]
    assert "n1" in reports[0].blamed()
    assert "all-reduce of all nodes" in stages_of(reports[0])


@pytest.mark.parametrize(
    ("hinder", "problem"),
    [
        (fail_at_copy, "copy on the device: rank 0 (n0, slot 0): RuntimeError: uncorrectable ECC error"),
        (die_in_collective, "all-reduce in a node: rank 1 (n0, slot 1): its process died of SIGKILL"),
    ],
)
def test_a_rank_that_fails_or_dies_is_named_and_ends_the_test(hinder: Hinder, problem: str) -> None:
    (report,) = run(1, 2, hinder)
    assert [str(p) for p in report.problems if p.kind == "failing"] == [f"failing: {problem}"]
    assert list(report.blamed()) == ["n0"]


def test_a_rank_that_hangs_is_named_when_its_time_is_over_and_is_killed() -> None:
    (report,) = run(1, 2, hang_at_product, Limits(timeout_seconds=15, slow_percent=0))
    (problem,) = report.problems
    assert str(problem) == "failing: matrix product: rank 1 (n0, slot 1): no answer within 15 s"
    assert stages_of(report) == {"matrix product"}


def test_a_node_that_does_not_come_is_named() -> None:
    listener = listen(Address("127.0.0.1", 0))
    place = Place(0, 2, "n0", Address("127.0.0.1", listener.getsockname()[1]), listener, ("n0", "n1"))
    report = supervise(place, 1, Limits(timeout_seconds=1), unhindered)
    assert [str(problem) for problem in report.problems] == ["failing: meeting: n1: has not come within 3 s"]


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mcore_rl.cli", "doctor", "--node", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_commands_are_two_nodes_and_the_first_reports() -> None:
    meeting = ["--rendezvous", f"127.0.0.1:{free_port()}", "--nodes", "2", "--slots", "2", "--slow-percent", "0"]
    nodes = [start(*meeting, "--node-rank", str(node), "--json") for node in range(2)]
    (first, errors), (second, more_errors) = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors + more_errors
    assert second == ""
    report = json.loads(first)
    assert report["ok"]
    assert len(report["nodes"]) == len(set(report["nodes"])) == 2
    ranks = [figure["ranks"] for figure in report["figures"] if figure["stage"].startswith("all-reduce")]
    assert ranks == [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3]]


def test_ranks_end_with_their_supervisor_however_that_ends() -> None:
    node = start("--slots", "2")
    supervisor = psutil.Process(node.pid)
    try:
        # Python's helper of spawned processes is a child too.
        while len(ranks := [p for p in supervisor.children() if "spawn_main" in " ".join(p.cmdline())]) < 2:
            assert node.poll() is None, node.communicate()
            time.sleep(0.05)
    finally:
        node.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    node.communicate()


def test_a_node_without_the_first_says_where_it_looked_for_it() -> None:
    words = ["--rendezvous", f"127.0.0.1:{free_port()}", "--nodes", "2", "--node-rank", "1", "--timeout", "1"]
    node = start(*words)
    output, errors = node.communicate(timeout=120)
    assert (node.returncode, output) == (1, "")
    assert f"error: node 0 of the fabric test does not answer at {words[1]}" in errors
    assert "Traceback" not in errors
