"""A real SLURM cluster with three nodes on this machine, in a temporary directory.

Each node is a simulated host with its own network, host name, and /dev/shm.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mcore_rl.runtime.addresses import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
MISSING = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
NODES = ("n1", "n2", "n3")
MARK = "MCORE_RL_TEST_SLURM"

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPort={port}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdTimeout=3600
MessageTimeout=60
ReturnToService=2
JobRequeue=1
MpiDefault=none
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Network:
    """A network bridge on this machine with the nodes' networks."""

    name: str
    prefix: str

    def address(self, node: str) -> str:
        return f"{self.prefix}.{NODES.index(node) + 1}"

    @property
    def controller(self) -> str:
        return f"{self.prefix}.254"

    def namespace(self, node: str) -> str:
        return f"{self.name}_{node}"

    def hosts(self) -> str:
        """Return the content of the nodes' /etc/hosts."""
        lines = [f"{self.address(node)} {node}" for node in NODES]
        return "\n".join(["127.0.0.1 localhost", f"{self.controller} {socket.gethostname()}", *lines, ""])


@contextlib.contextmanager
def node_networks() -> Iterator[Network]:
    """Create the nodes' networks. Skips the test if this machine does not allow it."""
    if os.geteuid() != 0:
        pytest.skip("SLURM nodes with networks of their own need root")
    network = Network(f"s{secrets.token_hex(3)}", f"10.214.{secrets.randbelow(256)}")
    try:
        _ip("link", "add", network.name, "type", "bridge")
        _ip("addr", "add", f"{network.controller}/24", "dev", network.name)
        _ip("link", "set", network.name, "up")
        for node in NODES:
            space, outside = network.namespace(node), f"{network.name}{node}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", outside, "netns", str(os.getpid()))
            _ip("link", "set", outside, "master", network.name, "up")
            _ip("-n", space, "addr", "add", f"{network.address(node)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")
            _ip("-n", space, "route", "add", "default", "via", network.controller)
        yield network
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", network.namespace(node)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", network.name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"networks for SLURM nodes cannot be made here: {done.stderr.strip()}")


@dataclass
class Slurm:
    """A running cluster."""

    directory: Path
    environment: dict[str, str]
    network: Network

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """Run a SLURM command; return its output."""
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=self.environment, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def ask(self, *command: str) -> str:
        """Run a command that can be repeated; again after a failure. munged gives up a caller that is late by 2 s."""
        for _ in range(10):
            with contextlib.suppress(AssertionError):
                return self.call(*command)
            time.sleep(1)
        return self.call(*command)

    def submit(self, script: Path) -> str:
        """Submit a job that runs in its script's directory; return its id."""
        return self.call("sbatch", "--parsable", str(script), cwd=script.parent)

    def state(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        shown = self.ask("scontrol", "show", "job", job)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait(self, condition: Callable[[], bool], what: str, log: Path, seconds: float = 400) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            shown = log.read_text() if log.exists() else "no log"
            assert time.monotonic() < deadline, (
                f"timed out after {seconds} s waiting for {what}:\n{shown[-4000:]}\n{self.logs()}"
            )
            time.sleep(0.3)

    def wait_for_end(self, job: str, log: Path) -> None:
        self.wait(lambda: self.state(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), "the end", log)

    def start_now(self, job: str, log: Path, restart: int) -> None:
        """Start a job that was requeued `restart` times without SLURM's delay of minutes, after its script ended."""
        self.wait(lambda: log.read_text().count(": queued again\n") == restart, "the script's last words", log)
        self.wait(lambda: self.state(job)["JobState"] == "PENDING", "the start before to be over", log)
        time.sleep(2)  # until SLURM has registered the end of the previous start
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in sorted(self.directory.glob("*.log")))


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    """Start munged, slurmctld and one slurmd per node; always kill them and their processes at the end."""
    with node_networks() as network, _daemons(network) as slurm:
        yield slurm


@contextlib.contextmanager
def _daemons(network: Network) -> Iterator[Slurm]:
    # Not tmp_path: munged rejects a socket in a directory that other users cannot enter.
    directory = Path(tempfile.mkdtemp(prefix="mcore_rl_slurm_", dir="/tmp"))
    directory.chmod(0o755)
    (directory / "state").mkdir()
    ports = [free_port() for _ in range(len(NODES) + 1)]
    nodes = [
        f"NodeName={name} NodeAddr={network.address(name)} Port={port} CPUs=1 RealMemory=2000 State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=False)
    ]
    (directory / "hosts").write_text(network.hosts())
    configuration = directory / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=f"{socket.gethostname()}({network.controller})",
            user=getpass.getuser(),
            directory=directory,
            port=ports[-1],
            nodes="\n".join(nodes),
            names=",".join(NODES),
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": SEARCHED, MARK: str(directory)}
    try:
        slurm = Slurm(directory, environment, network)
        _start(slurm)
        yield slurm
    finally:
        _kill_all(str(directory))
        shutil.rmtree(directory, ignore_errors=True)


def _start(slurm: Slurm) -> None:
    directory = slurm.directory
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    options = [f"--{name}={directory / file}" for name, file in {**files, "log-file": "munge.log"}.items()]
    slurm.call("munged", *options)
    slurm.call("slurmctld", "-f", slurm.environment["SLURM_CONF"])
    for name in NODES:
        start = (
            f"mount -t tmpfs -o size=50% shm /dev/shm && mount --bind {directory}/hosts /etc/hosts && "
            f'hostname {name} && exec slurmd -N {name} -f "$SLURM_CONF"'
        )
        # Not `ip netns exec`, which hides the control groups that slurmd needs.
        enter = ("nsenter", f"--net=/run/netns/{slurm.network.namespace(name)}")
        slurm.call(*enter, "unshare", "--mount", "--ipc", "--uts", "bash", "-c", start)
    idle = lambda: slurm.ask("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NODES)  # noqa: E731
    slurm.wait(idle, "all nodes to be idle", directory / "slurmctld.log", 120)


def _kill_all(mark: str) -> None:
    """Kill all processes with the mark in their environment, which daemons and jobs inherit even if they detach."""
    for _ in range(20):
        found = [process for process in psutil.process_iter() if _mark_of(process) == mark]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError):
        return None
