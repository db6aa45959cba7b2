"""Jobs on a real SLURM: a bad node is excluded and a preempted run requeued, without any effect on the result."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import metrics
from tests.e2e.slurm_cluster import MISSING, Slurm, slurm_cluster
from tests.e2e.test_async_run import assert_whole

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
    slurm.call("scancel", "--signal=USR1", "--batch", job)
    slurm.wait(lambda: restarts() == 2 or says("the run ended"), "the job to be queued again", log)
    assert says("stopped on request: step 1 is saved"), log.read_text()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_1"]
    assert list(metrics(run_dir)) == [0, 1]
    slurm.start_now(job, log, 2)
    slurm.wait(lambda: slurm.state(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), "the end", log)
    assert slurm.state(job)["JobState"] == "COMPLETED", log.read_text()
    assert metrics(run_dir) == metrics(whole_run)
    for path in (whole_run / "rollouts").iterdir():
        assert (run_dir / "rollouts" / path.name).read_text() == path.read_text()
    assert not list((run_dir / "slurm").glob("*/token"))  # tokens are deleted with their cluster


@pytest.mark.on_demand
def test_a_job_preempted_amid_asynchronous_rollouts_loses_no_group(slurm: Slurm, task: Path, tmp_path: Path) -> None:
    """The trainer rank is on one node and the engine on the other."""
    run_dir = tmp_path / "run"
    apart = ("cluster.placement=disaggregated", "rollout.nodes=1", "actor.num_ranks=1", "actor.parallel.ep=1")
    ahead = ("rollout.max_staleness=2", "algorithm.policy_loss.name=decoupled_ppo", "trainer.steps=6")
    job = slurm.submit(write_job(tmp_path, task, run_dir, "none", *apart, *ahead, "rollout.max_response_tokens=48"))
    log = tmp_path / f"preempted.{job}.log"

    def says(pattern: str) -> bool:
        return log.exists() and re.search(pattern, log.read_text()) is not None

    slurm.wait(lambda: says(r"step +2/6|the run ended"), "the second step", log)
    slurm.call("scancel", "--signal=USR1", "--batch", job)
    slurm.wait(lambda: int(slurm.state(job)["Restarts"]) == 1 or says("the run ended"), "the job to be queued", log)
    saved = json.loads((last_checkpoint(run_dir) / "rollouts" / "groups.json").read_text())
    assert saved["groups"], "no group was in flight"
    slurm.start_now(job, log, 1)
    slurm.wait(lambda: slurm.state(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), "the end", log)
    assert slurm.state(job)["JobState"] == "COMPLETED", log.read_text()
    assert_whole(run_dir, 6)


def last_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def test_job_with_only_bad_nodes_ends_with_reason_and_excludes_none(slurm: Slurm, task: Path, tmp_path: Path) -> None:
    job = slurm.submit(write_job(tmp_path, task, tmp_path / "run", bad="n*"))
    log = tmp_path / f"preempted.{job}.log"
    slurm.wait(lambda: slurm.state(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), "the end", log)
    assert slurm.state(job)["JobState"] == "FAILED"
    assert slurm.state(job)["ExcNodeList"] == "(null)"
    assert "node n2 failed its check: no such environment" in log.read_text()
    assert "every node failed its check" in log.read_text()
