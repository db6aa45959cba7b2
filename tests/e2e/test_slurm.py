"""Jobs on a real SLURM: a job whose nodes all fail their check ends; on demand, a bad node is excluded and a preempted
run requeued, without any effect on the result."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import assert_same_records, metrics
from tests.e2e.slurm_cluster import MISSING, Slurm, slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed ({', '.join(MISSING)}): make slurm"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as running:
        yield running


def write_job(directory: Path, task: Path, run_dir: Path, bad: str, *overrides: str) -> Path:
    """Write a job script for two nodes. Nodes that match the pattern `bad` fail to activate the environment."""
    (directory / "activate.sh").write_text(
        f'[[ "$SLURMD_NODENAME" != {bad} ]] || {{ echo "no such environment"; exit 1; }}\n'
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n"
    )
    words = [
        *("slurm", "--force", str(task), "cluster.nodes=2", "cluster.gpus_per_node=1", f"run.dir={run_dir}"),
        *("slurm.cpus_per_node=1", "slurm.setup=[source activate.sh]", "slurm.job_name=preempted"),
        # The three nodes share one busy machine, so none may be rejected as slow.
        *("slurm.fabric_test=true", "slurm.fabric_slow_percent=0"),
        *overrides,
    ]
    done = subprocess.run([sys.executable, "-m", "mcore_rl.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    script = directory / "job.sbatch"
    script.write_text(done.stdout)
    return script


@pytest.mark.on_demand  # tests/unit/slurm/test_job.py requeues jobs and excludes nodes, with fakes of SLURM's commands
def test_preempted_job_excludes_bad_node_and_ends_with_equal_results(
    slurm: Slurm, task: Path, whole_run: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "it's here"
    directory.mkdir()
    run_dir = directory / "my run"
    job = slurm.submit(write_job(directory, task, run_dir, bad="n2"))
    log = directory / f"preempted.{job}.log"

    def says(pattern: str) -> bool:
        return log.exists() and re.search(pattern, log.read_text()) is not None

    def restarts() -> int:
        return int(slurm.state(job)["Restarts"])

    slurm.wait(lambda: says("excluded from now on: n2") or says("the run ended|every node failed"), "the bad node", log)
    assert says("node n2 failed its check: no such environment"), log.read_text()
    assert not says("node n1 failed"), log.read_text()
    slurm.start_now(job, log, 1)
    # Preempt the run after its start and long before the end of its first step.
    slurm.wait(lambda: (run_dir / "config.yaml").exists() or says("the run ended"), "the run to begin", log)
    assert slurm.state(job)["NodeList"] == "n[1,3]"
    reports = [path.read_text() for path in (run_dir / "slurm" / f"{job}.1").glob("fabric-n*.log")]
    assert sorted(text.splitlines()[-1] for text in reports) == ["n1: sound", "n3: sound"]
    assert "nodes: 2, slots per node: 1" in "".join(reports)
    slurm.ask("scancel", "--signal=USR1", "--batch", job)
    slurm.wait(lambda: restarts() == 2 or says("the run ended"), "the job to be queued again", log)
    assert says("stopped on request: step 1 is saved"), log.read_text()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_1"]
    expected = metrics(whole_run)
    assert metrics(run_dir) == {step: expected[step] for step in (0, 1)}
    slurm.wait(lambda: not list((run_dir / "slurm").glob("*/token")), "tokens to be deleted with their cluster", log)
    slurm.start_now(job, log, 2)
    slurm.wait_for_end(job, log)
    assert slurm.state(job)["JobState"] == "COMPLETED", log.read_text()
    assert metrics(run_dir) == expected
    assert_same_records(run_dir, whole_run)


def test_job_with_only_bad_nodes_ends_with_reason_and_excludes_none(slurm: Slurm, task: Path, tmp_path: Path) -> None:
    job = slurm.submit(write_job(tmp_path, task, tmp_path / "run", bad="n*"))
    log = tmp_path / f"preempted.{job}.log"
    slurm.wait_for_end(job, log)
    assert slurm.state(job)["JobState"] == "FAILED"
    assert slurm.state(job)["ExcNodeList"] == "(null)"
    assert "node n2 failed its check: no such environment" in log.read_text()
    assert "every node failed its check" in log.read_text()
