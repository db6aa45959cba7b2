"""A whole job in bash, with fakes of SLURM's commands and of Python."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from mcore_rl.config.schema import Config
from mcore_rl.slurm.script import render_job

SECRET, PLAIN = "s3cret-of-the-test", "plain value's"
# Fake srun on one node: it records the command line, which all users of the node could list, and runs the task.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>"$NOTES/lines"
while [[ $1 == --* ]]; do shift; done
SLURMD_NODENAME=n1 exec "$@"
"""
# Fake scontrol: it records its calls, and refuses the first $REFUSALS of each command, except for the names of nodes.
SCONTROL = """#!/usr/bin/env bash
[[ $2 != hostnames ]] || { echo n1; exit; }
printf '%s\\n' "$*" >>"$NOTES/scontrol.$1"
(($(wc -l <"$NOTES/scontrol.$1") > ${REFUSALS:-0})) || { echo 'no answer' >&2; exit 1; }
[[ $1 != show ]] || echo 'ReqNodeList=(null) ExcNodeList=n7,n8 StartTime=now'
"""
# Fake sleep: the job waits for files of its tasks, and between attempts of scontrol.
SLEEP = """#!/usr/bin/env bash
exec /usr/bin/sleep 0.05
"""
# Fake python for the node check, Ray and the run: each creates the file for which the job waits.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>"$NOTES/lines"
printf '%s=%s|%s|%s\\n' "$2" "$MY_TOKEN" "$PLAIN" "$(stat -c %a "$RAY_AUTH_TOKEN_PATH")" >>"$NOTES/tasks"
attempt=${RAY_AUTH_TOKEN_PATH%/*}
case $2 in
  *node_check) touch "$attempt/checked/n1" ;;
  *fabric_node) echo "slow: a link"; [[ $FABRIC == bad ]] || touch "$attempt/sound/n1"; echo "n1: $FABRIC" ;;
  *ray_node) echo 127.0.0.1:1 >"$attempt/address"; touch "$attempt/joined/n1"
    until [[ -e $attempt/stop ]]; do sleep 0.1; done ;;
  *cli) exit "${RUN_EXITS:-7}" ;;
esac
"""


def submit(
    directory: Path, variables: dict[str, str], *, fabric_test: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a job that passes MY_TOKEN on and sets PLAIN."""
    programs = directory / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sleep", SLEEP), ("python", PYTHON)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    config = Config()
    config.run.dir, config.cluster.device, config.slurm.fabric_test = "runs/x", "cpu", fabric_test
    config.slurm.pass_environment, config.slurm.environment = ["MY_TOKEN"], {"PLAIN": PLAIN}
    overrides = ["slurm.pass_environment=[MY_TOKEN]", f"slurm.environment.PLAIN={PLAIN}", "trainer.steps=3"]
    script = render_job(config, ["c.yaml"], overrides)
    # The value occurs once, whether the script quotes it as a whole or only in part.
    assert script.count("plain value") == 1
    assert SECRET not in script
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "NOTES": str(directory), "SLURM_JOB_ID": "5"}
    environment |= {"SLURM_JOB_NODELIST": "n1"} | variables
    return subprocess.run(
        ["bash", "-c", script], cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def calls(directory: Path, command: str) -> list[str]:
    """Return the arguments of all calls of a command of scontrol."""
    return (directory / f"scontrol.{command}").read_text().splitlines()


def test_job_passes_environment_without_command_lines(tmp_path: Path) -> None:
    done = submit(tmp_path, {"MY_TOKEN": SECRET, "RAY_AUTH_TOKEN": "of another cluster"})
    assert done.returncode == 7, done.stdout + done.stderr
    lines = (tmp_path / "lines").read_text()
    assert "trainer.steps=3" in lines
    assert not [secret for secret in (SECRET, "plain value", "slurm.environment.PLAIN") if secret in lines]
    tasks = (tmp_path / "tasks").read_text().splitlines()
    programs = ("mcore_rl.slurm.node_check", "mcore_rl.slurm.ray_node", "mcore_rl.cli")
    assert tasks == [f"{program}={SECRET}|{PLAIN}|600" for program in programs]
    run_dir = tmp_path / "runs" / "x"
    assert stat.S_IMODE(run_dir.stat().st_mode) == stat.S_IMODE((run_dir / "slurm").stat().st_mode) == 0o700
    assert stat.S_IMODE(run_dir.parent.stat().st_mode) != 0o700
    kept = [path.read_text() for path in run_dir.rglob("*") if path.is_file()]
    assert not [text for text in kept if SECRET in text or "plain value" in text]
    assert not list(run_dir.rglob("token"))


def test_job_runs_fabric_test_before_ray_and_logs_slow_link(tmp_path: Path) -> None:
    done = submit(tmp_path, {"MY_TOKEN": SECRET, "FABRIC": "sound"}, fabric_test=True)
    assert done.returncode == 7, done.stdout + done.stderr
    tasks = [line.partition("=")[0] for line in (tmp_path / "tasks").read_text().splitlines()]
    assert tasks == [f"mcore_rl.{task}" for task in ("slurm.node_check", "slurm.fabric_node", "slurm.ray_node", "cli")]
    assert "mcore-rl job 5: fabric test: slow: a link\n" in done.stdout


def test_job_names_and_excludes_node_blamed_by_fabric_test(tmp_path: Path) -> None:
    done = submit(tmp_path, {"MY_TOKEN": SECRET, "FABRIC": "bad"}, fabric_test=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node n1 failed its fabric test: n1: bad\n" in done.stdout
    assert "excluded from now on: n7,n8,n1\n" in done.stdout  # n7 and n8 were excluded before
    assert "ray_node" not in (tmp_path / "tasks").read_text()


def test_job_asks_a_busy_controller_again(tmp_path: Path) -> None:
    """Nodes that were excluded before must not be forgotten, and the job must not stay held."""
    done = submit(tmp_path, {"MY_TOKEN": SECRET, "FABRIC": "bad", "REFUSALS": "3"}, fabric_test=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "excluded from now on: n7,n8,n1\n" in done.stdout
    update = "update JobId=5 ExcNodeList=n7,n8,n1 StartTime=now+60"
    assert [calls(tmp_path, name) for name in ("show", "requeuehold", "update", "release")] == [
        ["show job 5"] * 4,
        ["requeuehold 5"] * 4,
        [update] * 4,
        ["release 5"] * 4,
    ]


@pytest.mark.parametrize(("refusals", "returncode"), [("9", 0), ("10", 75)])
def test_preempted_job_asks_ten_times_to_be_queued_again(tmp_path: Path, refusals: str, returncode: int) -> None:
    done = submit(tmp_path, {"MY_TOKEN": SECRET, "RUN_EXITS": "75", "REFUSALS": refusals})
    assert done.returncode == returncode, done.stdout + done.stderr
    assert calls(tmp_path, "requeue") == ["requeue 5"] * 10
    assert ("submit it again to continue" in done.stdout) == (returncode == 75)


def test_job_that_no_controller_answers_names_the_bad_node(tmp_path: Path) -> None:
    done = submit(tmp_path, {"MY_TOKEN": SECRET, "FABRIC": "bad", "REFUSALS": "99"}, fabric_test=True)
    assert done.returncode == 1
    assert "SLURM refuses to change the job; submit it again with --exclude=n1\n" in done.stdout
    assert calls(tmp_path, "show") == ["show job 5"] * 10


def test_job_without_passed_variable_exits_2_and_names_it(tmp_path: Path) -> None:
    done = submit(tmp_path, {})
    assert done.returncode == 2
    assert "slurm.pass_environment: MY_TOKEN is not set; export it" in done.stdout
    assert not (tmp_path / "lines").exists()


@pytest.mark.parametrize(
    ("container", "expected"),
    [("pyxis", "--container-env=MY_TOKEN,OTHER"), ("apptainer", "apptainer exec --pwd")],
)
def test_container_options_contain_variable_names_only(container: str, expected: str) -> None:
    config = Config()
    config.run.dir, config.cluster.device = "runs/x", "cpu"
    config.slurm.pass_environment = ["MY_TOKEN", "OTHER"]
    config.slurm.container, config.slurm.container_image = container, "i.sqsh"
    script = render_job(config, ["c.yaml"])
    assert expected in script
    assert 'export "APPTAINERENV_$name=${!name}"' in script
