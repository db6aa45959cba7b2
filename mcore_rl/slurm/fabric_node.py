"""One node's part in a job's fabric test: `python -m mcore_rl.slurm.fabric_node`, as a SLURM task on every node.

The first node publishes where they meet as ATTEMPT/fabric_address, on a port of this start alone, and prints the
report. Each node that is not to blame for anything leaves its name in ATTEMPT/sound; its last line says why not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from mcore_rl.doctor.fabric.board import Address, listen
from mcore_rl.doctor.fabric.command import leave_the_unkillable
from mcore_rl.doctor.fabric.report import as_text
from mcore_rl.doctor.fabric.supervisor import START_TIMEOUTS, Limits, Place, supervise
from mcore_rl.errors import McoreRLError
from mcore_rl.slurm.meeting import address_here, is_first, publish, wait_for
from mcore_rl.slurm.node_check import node_name, put_name


def main() -> int:
    """Returns 1 when this node is to blame for something, or the test did not take place."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--attempt", type=Path, required=True, help="directory of this start")
    parser.add_argument("--nodes", type=int, required=True, help="how many take part")
    parser.add_argument("--slots", type=int, required=True, help="ranks per node")
    parser.add_argument("--timeout-seconds", type=int, required=True, help="of each stage")
    parser.add_argument("--slow-percent", type=int, required=True)
    options = parser.parse_args()
    try:
        place = _place(options)
        report = supervise(place, options.slots, Limits(options.timeout_seconds, options.slow_percent))
    except McoreRLError as error:
        print(f"{node_name()}: {error}")
        return 1
    if place.index == 0:
        print(as_text(report))
    problem = report.blamed().get(node_name())
    if problem is None:
        put_name(options.attempt / "sound")
    print(f"{node_name()}: {problem or 'sound'}", flush=True)
    exit_code = 0 if problem is None else 1
    leave_the_unkillable(exit_code)
    return exit_code


def _place(options: argparse.Namespace) -> Place:
    path: Path = options.attempt / "fabric_address"
    index = int(os.environ["SLURM_NODEID"])
    if not is_first():
        published = wait_for(path, time.monotonic() + START_TIMEOUTS * options.timeout_seconds) or ""
        host, _, port = published.rpartition(":")
        return Place(index, options.nodes, node_name(), Address(host, int(port)))
    host = address_here()
    listener = listen(Address(host, 0))
    address = Address(host, listener.getsockname()[1])
    publish(str(address), path)
    return Place(index, options.nodes, node_name(), address, listener)


if __name__ == "__main__":
    sys.exit(main())
