"""Fabric test of a SLURM node: rendezvous, and the files for the job script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mcore_rl.doctor.fabric.plan import Fabric
from mcore_rl.doctor.fabric.rendezvous import Address, NodePlace
from mcore_rl.doctor.fabric.report import FabricProblem, FabricReport
from mcore_rl.errors import McoreRLError
from mcore_rl.slurm import fabric_node


class Job:
    """Job of two nodes; the second is blamed. Records the places of both."""

    def __init__(self, attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt, self._monkeypatch = attempt, monkeypatch
        self.places: list[NodePlace] = []
        (attempt / "sound").mkdir()
        monkeypatch.setattr(fabric_node, "supervise", self._supervise)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def _supervise(self, place: NodePlace, slots: int, timeout_seconds: float, slow_percent: float) -> FabricReport:
        assert (slots, timeout_seconds, slow_percent) == (2, 3, 80)
        self.places.append(place)
        if place.listener is not None:
            place.listener.close()
        problem = FabricProblem("slow", "copy", "rank 3 (n2, GPU 1)", "1 GiB/s", (3,), ("n2",))
        return FabricReport(Fabric(("n1", "n2"), 2, "cuda"), "H100", [], [problem])

    def take_part(self, node: int) -> int:
        self._monkeypatch.setenv("SLURM_NODEID", str(node))
        self._monkeypatch.setenv("SLURMD_NODENAME", f"n{node + 1}")
        words = "--nodes 2 --slots 2 --timeout-seconds 3 --slow-percent 80".split()
        self._monkeypatch.setattr(sys, "argv", ["fabric_node", "--attempt", str(self.attempt), *words])
        return fabric_node.main()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def test_nodes_meet_at_the_first_node(job: Job) -> None:
    job.take_part(0)
    job.take_part(1)
    first, second = job.places
    assert first.address == second.address == Address("127.0.0.1", first.address.port)
    assert first.listener is not None
    assert (second.index, second.num_nodes, second.host, second.listener) == (1, 2, "n2", None)


def test_blamed_node_prints_its_problem_and_leaves_no_file(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.take_part(0) == 0
    first = capsys.readouterr().out.splitlines()
    assert "slow: copy: rank 3 (n2, GPU 1): 1 GiB/s" in first
    assert first[-1] == "n1: sound"
    assert job.take_part(1) == 1
    assert capsys.readouterr().out.splitlines() == ["n2: slow: copy: rank 3 (n2, GPU 1): 1 GiB/s"]
    assert [path.name for path in (job.attempt / "sound").iterdir()] == ["n1"]


def test_unreachable_node_0_is_printed(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object) -> FabricReport:
        raise McoreRLError("node 0 does not answer")

    job.take_part(0)
    monkeypatch.setattr(fabric_node, "supervise", lost)
    assert job.take_part(1) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "n2: node 0 does not answer"
