"""One node of a job's Ray cluster: `python -m mcore_rl.slurm.ray_node`, as a SLURM task on every node.

The first node starts the head on a free port and publishes its address as ATTEMPT/address; the others wait for that
file and join. Every node creates ATTEMPT/joined/NODE, and ends when ATTEMPT/stop appears. Ports and temporary
directories are unique per node, so that two jobs, or two nodes of a test, can share a machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mcore_rl.runtime.addresses import free_port
from mcore_rl.runtime.session import RAYLET_VARIABLES, private_directory, temporary_files
from mcore_rl.slurm.meeting import address_of, is_first, node_name, parse_options, publish, put_name, wait_for

STOP_SECONDS = 25
"""Time for Ray to end. SLURM sends KILL 30 s after TERM (KillWait) by default."""


def main() -> int:
    """Run until ATTEMPT/stop appears. Exits with an error if Ray ends first."""
    numbers = {"cpus": "CPUs of this node", "gpus": "GPUs of this node", "object-store-bytes": "of this node"}
    options = parse_options(__doc__, {**numbers, "timeout-seconds": "time limit of the start"})
    # SystemExit runs the `finally` blocks, which end Ray and remove its directories.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with private_directory() as directory, temporary_files() as temporary:
        os.environ["TMPDIR"] = str(temporary)  # inherited by the raylet and by every process of the run on this node
        return _run(options, directory / "r")


def _run(options: argparse.Namespace, temporary: Path) -> int:
    ray: subprocess.Popen[bytes] | None = None
    try:
        deadline = time.monotonic() + options.timeout_seconds
        while True:
            # Variables that the user has set take precedence.
            ray = subprocess.Popen(_command(options, temporary, deadline), env=RAYLET_VARIABLES | os.environ)
            address = wait_for(temporary / "ray_current_cluster", deadline, ray)
            if address is not None:
                break
            # Ray 2.60 waits only 30 seconds for its node to start, too short on a busy host.
            print(f"{node_name()}: ray start failed with exit code {ray.returncode}, trying again", flush=True)
            time.sleep(2)
        if is_first():
            publish(address, options.attempt / "address")
        put_name(options.attempt / "joined")
        print(f"{node_name()}: joined {address}", flush=True)
        while not (options.attempt / "stop").exists():
            if ray.poll() is not None:
                sys.exit(f"{node_name()}: Ray ended by itself with exit code {ray.returncode}")
            time.sleep(1)
        return 0
    finally:
        _end(ray)


def _command(options: argparse.Namespace, temporary: Path, deadline: float) -> list[str]:
    if is_first():
        # The port of Ray's client server cannot be 0 (2.60); nothing here connects to it.
        role = ["--head", "--port=0", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
    else:
        role = [f"--address={wait_for(options.attempt / 'address', deadline)}"]
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
        *([f"--node-ip-address={address_of(interface)}"] if interface else []),
        f"--node-name={node_name()}",
        f"--temp-dir={temporary}",
        f"--num-cpus={options.cpus}",
        f"--num-gpus={options.gpus}",
        f"--object-store-memory={options.object_store_bytes}",
        "--dashboard-agent-listen-port=0",
        "--dashboard-agent-grpc-port=0",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--log-style=record",
    ]


def _end(ray: subprocess.Popen[bytes] | None) -> None:
    if ray is None:
        return
    ray.terminate()
    try:
        ray.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        ray.kill()
        ray.wait()


if __name__ == "__main__":
    sys.exit(main())
